"""What this plugin adds, by name. The modules behind the strings are imported when a name is used."""

from relax_gym import hookimpl


@hookimpl
def register_envs() -> dict[str, str]:
    """Environments of this plugin."""
    return {"hello/CountDown-v0": "hello_plugin.count_down:CountDown"}


@hookimpl
def register_rewards() -> dict[str, str]:
    """Rewards of this plugin."""
    return {"hello_brief": "hello_plugin.brief:Brief"}


@hookimpl
def register_algorithms() -> dict[str, str]:
    """Algorithms of this plugin."""
    return {"hello_rank": "hello_plugin.rank:Rank"}
