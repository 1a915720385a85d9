"""`rewards list | show | try` and `replay`: what rewards there are, and what they say of episodes that are over."""

from __future__ import annotations

import dataclasses
import inspect
import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relax_gym.cli.output import as_toml, documentation, new_app, parse_kwargs, print_table
from relax_gym.errors import ConfigError, PluginError, RunFolderError

if TYPE_CHECKING:
    from relax_gym.registry import Registry
    from relax_gym.rescoring import Case
    from relax_gym.types import Trajectory

RECORDED = "recorded"
CATALOG = "relax_gym_rewards.catalog:FACTS"
app = new_app("Rewards.")
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of the reward.")]
Key = Annotated[str | None, typer.Option(help="Which number counts, of a reward that returns several.")]
AgainstSet = Annotated[
    list[str] | None, typer.Option("--against-set", metavar="KEY=VALUE", help="An option of the other reward.")
]
Step = Annotated[int | None, typer.Option(help="[run] Only this step.")]
Kind = Annotated[str | None, typer.Option(help="[run] Only train, eval, queued, or the reason a group was dropped.")]
Limit = Annotated[int, typer.Option(min=0, help="Most episodes to list.")]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds that one episode may take.")]
Threshold = Annotated[float, typer.Option(help="Scores from here on pass, for accuracy and kappa.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")]


@app.command("list")
def list_(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Built-in ones as a table for docs/rewards.md, with options and range.")
    ] = False,
) -> None:
    """Every reward, what it is, and who brings it."""
    from relax_gym.plugins import plugins

    table = plugins().tables["reward"]
    if markdown:
        for line in markdown_table(table):
            print(line)
        return
    rows = []
    for name in table.names():
        try:
            summary = documentation(table.get(name)).partition("\n")[0]
        except PluginError as error:
            summary = f"cannot be loaded: {error}"
        rows.append((name, summary, table.source(name)))
    print_table(("name", "what it is", "from"), rows)


def markdown_table(table: Registry) -> Iterator[str]:
    """The built-in rewards in Markdown: name, what it is, range, options with defaults, example."""
    from relax_gym.registry import load

    facts = load(CATALOG)
    yield "| `name` | what it says | range | options (default) | example |"
    yield "|---|---|---|---|---|"
    for name in (name for name in table.names() if table.source(name) == "relax-gym"):
        factory = table.get(name)
        options = ", ".join(f"`{o}`" + (f" ({_cell(d)})" if d else "") for o, _, d in reward_options(factory))
        known = facts.get(name)
        example = f"`kwargs = {{ {known.example} }}`" if known and known.example else ""
        what = documentation(factory).partition("\n")[0]
        cells = (f"`{name}`", what, known.range if known else "", options, example)
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _bases(factory: Any) -> Iterator[type]:
    """Classes of the same package that a reward has options from."""
    for base in getattr(factory, "__mro__", ())[1:]:
        if base.__module__.partition(".")[0] == factory.__module__.partition(".")[0] and base.__doc__:
            yield base


def _cell(default: str) -> str:
    return "required" if default == "required" else f"`{default}`"


@app.command()
def show(name: Annotated[str, typer.Argument(help="Its name, see `rewards list`.")]) -> None:
    """Documentation, options with types and defaults, range, and an example for a config."""
    from relax_gym.plugins import plugins
    from relax_gym.registry import load

    factory = plugins().get("reward", name)
    print(f"{name}\n\n{documentation(factory) or 'No documentation.'}\n")
    for base in _bases(factory):
        print(f"{documentation(base)}\n")
    options = reward_options(factory)
    if options:
        print_table(("option", "type", "default"), options)
    else:
        print("It has no options.")
    facts = load(CATALOG).get(name)
    if facts is not None:
        print(f"\nrange: {facts.range}")
    example = facts.example if facts is not None else ", ".join(f"{o} = …" for o, _, d in options if d == "required")
    kwargs = f"\nkwargs = {{ {example} }}" if example else ""
    print(f'\n[[reward]]\nname = "{name}"{kwargs}')


def reward_options(factory: Any) -> list[tuple[str, str, str]]:
    """(name, type, default) of each option of a reward; "required" without a default."""
    parameters = inspect.signature(factory).parameters.values()
    return [_option(p) for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _option(parameter: inspect.Parameter) -> tuple[str, str, str]:
    kind, default = parameter.annotation, parameter.default
    if kind is parameter.empty:
        kind = "" if default is parameter.empty else type(default).__name__
    if not isinstance(kind, str):
        kind = inspect.formatannotation(kind)
    if default is parameter.empty:
        return parameter.name, kind, "required"
    made = type(default).__name__ == "_HAS_DEFAULT_FACTORY_CLASS"
    return parameter.name, kind, "empty" if made else as_toml(default)


@app.command("try")
def try_(
    name: Annotated[str, typer.Argument(help="Its name, see `rewards list`.")],
    source: Annotated[
        Path | None, typer.Argument(metavar="RUN_OR_JSONL", help="A run folder, or a file of cases.")
    ] = None,
    answer: Annotated[str | None, typer.Option(help="Score this answer.")] = None,
    reference: Annotated[str | None, typer.Option(help='[answer] What info["answer"] is.')] = None,
    question: Annotated[str, typer.Option(help="[answer] What was asked.")] = "",
    info: Annotated[
        list[str] | None, typer.Option("--info", metavar="KEY=VALUE", help="[answer] More of what the env says.")
    ] = None,
    set_: Set = None,
    key: Key = None,
    against: Annotated[
        str | None, typer.Option(help='Another reward to compare with, or "recorded": what the run gave.')
    ] = None,
    against_set: AgainstSet = None,
    against_key: Key = None,
    step: Step = None,
    kind: Kind = None,
    limit: Limit = 10,
    timeout: Timeout = 60.0,
    threshold: Threshold = 0.5,
    as_json: AsJson = False,
) -> None:
    """Score an answer, the cases of a JSONL file, or the episodes of a finished run; no model plays.

    Cases with a label say how well the reward agrees with it: this is how a judge is calibrated.
    """
    from relax_gym.rescoring import load_reward, read_cases, text_case

    if (source is None) == (answer is None):
        raise typer.BadParameter("give a run folder or a JSONL file, or --answer TEXT")
    if answer is None and (reference is not None or question or info):
        raise typer.BadParameter("--reference, --question and --info are for --answer; cases have their own")
    terms = [load_reward(name, parse_kwargs(set_ or (), option="--set"), key=key)]
    if against is not None and against != RECORDED:
        other = parse_kwargs(against_set or (), option="--against-set")
        terms.append(load_reward(against, other, key=against_key))
    elif against_set or against_key:
        raise typer.BadParameter("--against-set and --against-key are options of the reward that --against names")
    if source is not None:
        cases = read_cases(source, step=step, kind=kind)
    else:
        known = parse_kwargs(info or (), option="--info")
        cases = [text_case(answer or "", reference=reference, question=question, info=known)]
    report = _report(cases, terms, recorded=against == RECORDED, timeout=timeout, threshold=threshold)
    _print(report, limit, as_json)


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    reward: Annotated[str, typer.Option(help="The reward to score its episodes with.")],
    set_: Set = None,
    key: Key = None,
    step: Step = None,
    kind: Kind = None,
    limit: Limit = 10,
    timeout: Timeout = 60.0,
    threshold: Threshold = 0.5,
    as_json: AsJson = False,
) -> None:
    """Score the episodes of a finished run with another reward, and compare with what it gave.

    Short for `rewards try REWARD RUN --against recorded`.
    """
    if not run.is_dir():
        raise RunFolderError(f"{str(run)!r} is no folder of a run; `relax-gym rewards try` takes files, too")
    from relax_gym.rescoring import load_reward, read_cases

    term = load_reward(reward, parse_kwargs(set_ or (), option="--set"), key=key)
    cases = read_cases(run, step=step, kind=kind)
    _print(_report(cases, [term], recorded=True, timeout=timeout, threshold=threshold), limit, as_json)


def _report(
    cases: Sequence[Case], terms: Sequence[Any], *, recorded: bool, timeout: float, threshold: float
) -> dict[str, Any]:
    """All that is known after scoring, as data for JSON."""
    from relax_gym.agreement import agreement
    from relax_gym.rescoring import rescore

    scored = [rescore(cases, term, timeout=timeout) for term in terms]
    names = [term.name if not at else f"{term.name} (against)" for at, term in enumerate(terms)]
    columns = {name: [one.reward for one in found] for name, found in zip(names, scored, strict=True)}
    if recorded:
        if all(case.recorded is None for case in cases):
            raise ConfigError("--against recorded: these episodes have no reward of their own; name another reward")
        columns[RECORDED] = [case.recorded for case in cases]
    if any(case.label is not None for case in cases):
        columns["label"] = [case.label for case in cases]
    first, *others = columns
    return {
        "rewards": {name: _summary(values) for name, values in columns.items()},
        "metrics": {term.name: dict(term.reward.metrics()) for term in terms if hasattr(term.reward, "metrics")},
        "agreement": {
            other: dataclasses.asdict(agreement(columns[first], columns[other], threshold=threshold))
            for other in others
        },
        "episodes": [
            _episode(case, [found[at] for found in scored], {name: values[at] for name, values in columns.items()})
            for at, case in enumerate(cases)
        ],
    }


def _summary(values: Sequence[float | None]) -> dict[str, float | int | None]:
    scored = [value for value in values if value is not None]
    return {
        "scored": len(scored),
        "unscored": len(values) - len(scored),
        "mean": statistics.fmean(scored) if scored else None,
        "min": min(scored, default=None),
        "max": max(scored, default=None),
    }


def _episode(case: Case, scored: Sequence[Trajectory], scores: Mapping[str, float | None]) -> dict[str, Any]:
    failures = [why for one in scored for why in one.reward_failures.values()]
    parts = {name: value for one in scored for name, value in one.reward_parts.items()}
    turns = case.trajectory.turns
    return {
        "id": case.trajectory.episode_id,
        "scores": dict(scores),
        "parts": parts,
        "failures": failures,
        "said": turns[-1].action if turns else "",
    }


def _print(report: dict[str, Any], limit: int, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, indent=2))
        return
    rows = [(name, *map(_shown, summary.values())) for name, summary in report["rewards"].items()]
    print_table(("reward", "scored", "unscored", "mean", "min", "max"), rows)
    for other, found in report["agreement"].items():
        print(f"\nagreement with {other}")
        print_table([key.replace("_", " ") for key in found], [[_shown(value) for value in found.values()]])
    for name, metrics in report["metrics"].items():
        print(f"\n{name} counted")
        print_table(list(metrics), [[_shown(float(value)) for value in metrics.values()]])
    reasons = Counter(why for episode in report["episodes"] for why in episode["failures"])
    for why, count in reasons.most_common(3):
        print(f"\nunscored ({count}): {why}")
    episodes = sorted(report["episodes"], key=_apart, reverse=True)[:limit]
    if episodes:
        names = list(report["rewards"])
        print(f"\n{'where they differ most' if len(names) > 1 else 'episodes'}")
        print_table(
            ("episode", *names, "what it said last"),
            [
                (e["id"], *(_shown(e["scores"][name]) for name in names), " ".join(e["said"].split())[-60:])
                for e in episodes
            ],
        )


def _apart(episode: Mapping[str, Any]) -> float:
    """How far the other scores are from the first; a score that is missing is the farthest."""
    first, *others = episode["scores"].values()
    if first is None or None in others:
        return float("inf") if others else 0.0
    return max((abs(first - other) for other in others), default=0.0)


def _shown(value: float | int | None) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.4g}"
