"""`eval ENV --endpoint URL --model NAME`: its options, and the table it prints."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relax_gym.cli.envs import find_env
from relax_gym.cli.output import parse_kwargs, print_table
from relax_gym.errors import ConfigError

if TYPE_CHECKING:
    from relax_gym.endpoint.evaluate import EndpointEval

Url = Annotated[
    str | None,
    typer.Option("--endpoint", metavar="URL", help="An OpenAI-compatible endpoint, e.g. http://localhost:30000/v1."),
]
Model = Annotated[str | None, typer.Option(help="[endpoint] The model's name there.")]
KeyEnv = Annotated[
    str | None,
    typer.Option(
        metavar="VARIABLE", help="[endpoint] Environment variable that holds the key. Default: no key is sent."
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="[endpoint] Number of the first held-out episode.")]
Attempts = Annotated[int, typer.Option(min=1, help="[endpoint] Attempts at each episode.")]
Ks = Annotated[str | None, typer.Option("--k", help="[endpoint] Which pass@k, e.g. 1,4,8. Default: 1 and --attempts.")]
Concurrency = Annotated[int, typer.Option(min=1, help="[endpoint] Episodes that are played side by side.")]
Temperature = Annotated[float | None, typer.Option(min=0, help="[endpoint] Default: the server's.")]
MaxTokens = Annotated[
    int | None, typer.Option(min=1, help="[endpoint] Most tokens of an answer. Default: the server's.")
]
MaxTurns = Annotated[int, typer.Option(min=1, help="[endpoint] Most turns of an episode.")]
Body = Annotated[
    list[str] | None,
    typer.Option("--body", metavar="KEY=VALUE", help="[endpoint] One more field of every request, e.g. top_p=0.9."),
]
SendSeed = Annotated[bool, typer.Option("--send-seed/--no-send-seed", help="[endpoint] Whether requests have a seed.")]
Rewards = Annotated[list[str] | None, typer.Option("--reward", help="[endpoint] Sum of which rewards. Default: env.")]
AllRows = Annotated[
    bool, typer.Option("--all-rows", help="[endpoint] Play all rows of the env, not only those held out of training.")
]
Timeout = Annotated[float, typer.Option(min=0.1, help="[endpoint] Seconds that one try of a request may take.")]
Deadline = Annotated[float, typer.Option(min=0.1, help="[endpoint] Seconds of a request with all its tries.")]
Retries = Annotated[int, typer.Option(min=0, help="[endpoint] Most tries of a request after the first.")]
Out = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="[endpoint] Where to write. Default: runs/eval-ENV-MODEL.")
]
Resume = Annotated[bool, typer.Option("--resume", help="[endpoint] Go on with what FOLDER has.")]

SHARED = {"run", "episodes", "set_"}
OURS = {"model", "messages", "tools", "seed", "stream", "n"}


def refuse_foreign(context: typer.Context) -> None:
    """Raise BadParameter for an option that has no meaning without --endpoint, or none with it."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    if "endpoint" in given:
        if "checkpoint" in given:
            raise typer.BadParameter("--checkpoint is of a run of ours; leave it out with --endpoint")
        if "model" not in given:
            raise typer.BadParameter("--endpoint needs --model, the name of the model there")
    elif foreign := sorted(given - SHARED - {"checkpoint"}):
        raise typer.BadParameter(f"--{foreign[0].replace('_', '-')} is for --endpoint URL only")


def evaluate(params: Mapping[str, Any]) -> None:
    """Play the held-out episodes of an env with a model behind an endpoint, and print how they went."""
    from relax_gym.endpoint.evaluate import evaluate_endpoint

    evaluation = read(params)
    try:
        with _progress() as on_end:
            results = evaluate_endpoint(evaluation, resume=params["resume"], on_end=on_end)
    except KeyboardInterrupt:
        print(
            f"interrupted; what is finished is in {evaluation.out}: the same command with --resume goes on",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    print(f"{evaluation.env}  {evaluation.endpoint.model}  {evaluation.out}")
    print_table(("", "value", "standard error", "tasks"), list(estimate_rows(results)))
    print()
    print_table(COUNTS, [count_row(results)])


def read(params: Mapping[str, Any]) -> EndpointEval:
    """Options of the command line as an evaluation. Raises ConfigError."""
    from relax_gym.endpoint.client import EndpointConfig
    from relax_gym.endpoint.evaluate import EndpointEval

    env = find_env(params["run"])
    attempts, model = params["attempts"], params["model"]
    return EndpointEval(
        env=env,
        kwargs=parse_kwargs(params["set_"] or (), option="--set"),
        endpoint=EndpointConfig(
            url=params["endpoint"],
            model=model,
            body=_body(params),
            **{name: params[name] for name in ("key_env", "timeout", "deadline", "retries")},
        ),
        out=params["out"] or Path("runs") / f"eval-{_slug(env)}-{_slug(model)}",
        rewards=tuple(params["reward"] or ("env",)),
        episodes=params["episodes"] or 100,
        ks=_ks(params["k"]) or tuple(sorted({1, attempts})),
        **{n: params[n] for n in ("seed", "attempts", "max_turns", "concurrency", "all_rows", "send_seed")},
    )


COUNTS = ("episodes", "request errors", "env errors", "unscored", "turns", "tokens in", "tokens out", "s", "endings")


def estimate_rows(results: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Reward, accuracy and pass@k with their standard errors; what could not be estimated is a dash."""
    named = {"reward": results["reward"], "accuracy": results["accuracy"]}
    named |= {f"pass@{k}": estimate for k, estimate in results["pass@k"].items()}
    for name, estimate in named.items():
        if estimate is None:
            yield name, "-", "-", "0"
        else:
            error = estimate["stderr"]
            yield name, f"{estimate['mean']:.4f}", "-" if error is None else f"{error:.4f}", str(estimate["tasks"])


def count_row(results: Mapping[str, Any]) -> tuple[str, ...]:
    """What COUNTS name."""
    turns = results["turns"]
    return (
        str(results["episodes"]),
        str(results["errors"]["request"]),
        str(results["errors"]["env"]),
        str(results["unscored"]),
        "-" if turns is None else f"{turns:.1f}",
        str(results["prompt_tokens"]),
        str(results["completion_tokens"]),
        f"{results['wall_seconds']:.0f}",
        ", ".join(f"{reason} {count}" for reason, count in results["stop"].items()),
    )


def _body(params: Mapping[str, Any]) -> dict[str, Any]:
    body = parse_kwargs(params["body"] or (), option="--body")
    if taken := sorted(OURS & body.keys()):
        raise ConfigError(f"--body {taken[0]}=… is set by the evaluation itself; leave it out")
    named = {"temperature": params["temperature"], "max_tokens": params["max_tokens"]}
    return {**body, **{name: value for name, value in named.items() if value is not None}}


def _ks(text: str | None) -> tuple[int, ...]:
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    if wrong := [part for part in parts if not part.isdecimal() or int(part) < 1]:
        raise ConfigError(f"--k {text!r}: {wrong[0]!r} is no positive number; give some like 1,4,8")
    return tuple(sorted({int(part) for part in parts}))


def _slug(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-.")


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on the terminal; nothing where stderr is none."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("episodes", total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)
