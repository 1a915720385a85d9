"""Built-in environments, one in a file."""

from relax_gym.hookspecs import hookimpl
from relax_gym_envs.catalog import ENVS


@hookimpl
def register_envs() -> dict[str, str]:
    """The built-in environments."""
    return ENVS
