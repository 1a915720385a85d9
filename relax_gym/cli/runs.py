"""`train`, `eval`, `view`: what is done with a run."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relax_gym.cli import endpoints

if TYPE_CHECKING:
    from relax_gym.types import Trajectory

Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one value, e.g. train.steps=20.")
]


def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file of the run.")],
    set_: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check all that takes no weights and no server, play an episode of each env, write nothing; exit code "
            "1 on a failure.",
        ),
    ] = False,
) -> None:
    """Train a language model."""
    from relax_gym.config import load_config
    from relax_gym.errors import Stopped
    from relax_gym.launch import launched_rank, serve_learner

    run = load_config(config, set_ or ())
    if dry_run:
        if launched_rank():
            return
        from relax_gym import dry_run as rehearsal

        report = rehearsal.dry_run(run, resume=resume)
        print(rehearsal.render(report))
        if report.failures:
            raise typer.Exit(1)
        return
    if serve_learner(run):
        return
    from relax_gym.display import Display

    try:
        with Display(run):
            from relax_gym.train import train as start

            start(run, resume=resume)
    except (KeyboardInterrupt, Stopped) as error:
        changes = [part for item in set_ or () for part in ("--set", item)]
        begun = (Path(run.run_dir) / "config.toml").exists()
        again = shlex.join(["relax-gym", "train", str(config), *changes, *(["--resume"] if begun else [])])
        how = str(error) if isinstance(error, Stopped) else "interrupted"
        print(f"{how}; {'continue' if begun else 'start again'} with: {again}", file=sys.stderr)
        raise typer.Exit(128 + (error.signal if isinstance(error, Stopped) else 2)) from None


def evaluate(
    context: typer.Context,
    run: Annotated[
        str, typer.Argument(metavar="CONFIG_OR_RUN_OR_ENV", help="A TOML file, the folder of a run, or an env's id.")
    ],
    checkpoint: Annotated[
        str | None, typer.Option(help="Step of a checkpoint of the run, or a model folder. Default: the newest.")
    ] = None,
    episodes: Annotated[int | None, typer.Option(min=1, help="Episodes of each env.")] = None,
    set_: Overrides = None,
    endpoint: endpoints.Url = None,
    model: endpoints.Model = None,
    key_env: endpoints.KeyEnv = None,
    seed: endpoints.Seed = 0,
    attempts: endpoints.Attempts = 1,
    k: endpoints.Ks = None,
    concurrency: endpoints.Concurrency = 16,
    temperature: endpoints.Temperature = None,
    max_tokens: endpoints.MaxTokens = None,
    max_turns: endpoints.MaxTurns = 8,
    body: endpoints.Body = None,
    send_seed: endpoints.SendSeed = True,
    reward: endpoints.Rewards = None,
    all_rows: endpoints.AllRows = False,
    timeout: endpoints.Timeout = 300.0,
    deadline: endpoints.Deadline = 900.0,
    retries: endpoints.Retries = 8,
    out: endpoints.Out = None,
    resume: endpoints.Resume = False,
) -> None:
    """Play the held-out episodes and print how they went.

    With --endpoint, those of an ENV are played by a model behind an OpenAI-compatible endpoint: see docs/evaluation.md.
    """
    endpoints.refuse_foreign(context)
    if endpoint is None:
        evaluate_checkpoint(Path(run), checkpoint, episodes, set_ or ())
    else:
        endpoints.evaluate(context.params)


def evaluate_checkpoint(run: Path, checkpoint: str | None, episodes: int | None, overrides: Sequence[str]) -> None:
    """Evaluate a model that the config's own sampler plays, and print a table."""
    from relax_gym.cli.output import print_table
    from relax_gym.config import load_config
    from relax_gym.evaluate import evaluate_run

    config = load_config(run / "config.toml" if run.is_dir() else run, overrides)
    model = find_model(run, checkpoint)
    result = evaluate_run(config, model_path=model, episodes=episodes)
    print(f"model: {model or config.model.name}")
    print_table(EVALUATION_COLUMNS, evaluation_rows(result.trajectories))


def view(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    step: Annotated[int | None, typer.Option(help="Only this step; 0 is before training. Default: the newest.")] = None,
    episode: Annotated[str | None, typer.Option(help="Only the episode with this id.")] = None,
    kind: Annotated[str | None, typer.Option(help="train, eval, queued, or the reason a group was dropped.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Highest reward first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest reward first.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Most episodes to show.")] = 3,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with their images, videos and audio to this file instead.")
    ] = None,
) -> None:
    """Show episodes in the terminal, or as a page for the browser.

    What was fed is dim, what the model said is bright: green where it was sure, red where that was unlikely.
    """
    from rich.console import Console

    from relax_gym.view import Wanted, read_episodes, render_episode, run_tokenizer

    if best and worst:
        raise typer.BadParameter("--best and --worst exclude each other")
    order = "best" if best else "worst" if worst else None
    wanted = Wanted(step=step, episode=episode, kind=kind, order=order, limit=limit)
    records = read_episodes(run, wanted)
    tokenizer = run_tokenizer(run)
    console = Console(soft_wrap=True)
    if html is not None:
        from relax_gym.view_html import write_page

        megabytes = write_page(html, run, records, tokenizer) / 1e6
        print(f"{html}: {len(records)} episode{'s' * (len(records) != 1)}, {megabytes:.2f} MB")
        if megabytes > LARGE_PAGE:
            print("browsers are slow with pages of this size; a smaller --limit helps", file=sys.stderr)
        return
    for record in records:
        console.print(render_episode(record, tokenizer))


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="The folder of a run, or of a checkpoint.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it must not exist.")],
    checkpoint: Annotated[int | None, typer.Option(help="Step of the run's checkpoint. Default: the newest.")] = None,
) -> None:
    """Write a checkpoint's model as a folder that transformers and inference engines load."""
    from relax_gym import export as exporting

    found = exporting.find_checkpoint(run, checkpoint)
    if exporting.export(found, out):
        print(f"{out}: the model of {found}")
    else:
        print(f"{out}: a copy of the model in {found}, which is a model folder already")


def doctor(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="The folder of a run or evaluation. Default: the plugins.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say whether a run is alive, what it waits for, what went wrong last and what to do.

    The exit code is 1 for a run that hangs, has failed, was killed, or whose folder is broken. Without RUN, it checks
    the plugins that are installed.
    """
    if run is None:
        from relax_gym.cli import extend

        extend.doctor()
        return
    import json
    from dataclasses import asdict

    from relax_gym.doctor import diagnose, render

    found = diagnose(run)
    print(json.dumps(asdict(found), indent=2) if as_json else render(found))
    if found.state in ("hangs", "failed", "killed", "broken"):
        raise typer.Exit(1)


LARGE_PAGE = 100  # MB
EVALUATION_COLUMNS = ("env", "episodes", "reward", "accuracy", "turns", "tokens", "endings")


def evaluation_rows(trajectories: Sequence[Trajectory]) -> list[tuple[str, ...]]:
    """One row for each env."""
    from relax_gym.metrics import evaluation_summary

    rows: list[tuple[str, ...]] = []
    for env in sorted({trajectory.task.env_id for trajectory in trajectories}):
        of_env = [trajectory for trajectory in trajectories if trajectory.task.env_id == env]
        summary = evaluation_summary(of_env)
        endings = Counter(str(trajectory.stop_reason) for trajectory in of_env)
        rows.append(
            (
                env,
                str(len(of_env)),
                f"{summary['reward']:.3f}" if "reward" in summary else "unscored",
                f"{summary['accuracy']:.3f}" if "accuracy" in summary else "-",
                f"{summary['turns']:.1f}",
                f"{summary['tokens']:.1f}",
                ", ".join(f"{reason} {count}" for reason, count in endings.most_common()),
            )
        )
    return rows


def find_model(run: Path, checkpoint: str | None) -> Path | None:
    """The model folder to evaluate; None means the config's own model.

    Raises:
        RunFolderError: the run has no such checkpoint; says which it has.
        ModelError: the folder given is no model.
    """
    from relax_gym.errors import RunFolderError
    from relax_gym.export import holds_model
    from relax_gym.models import check_model
    from relax_gym.run_folder import list_checkpoints

    if checkpoint is not None and not checkpoint.isdigit():
        return check_model(Path(checkpoint))
    found = dict(list_checkpoints(run)) if run.is_dir() else {}
    if checkpoint is None and not found:
        return None
    step = max(found) if checkpoint is None else int(checkpoint)
    if step not in found:
        steps = ", ".join(map(str, found)) or "none"
        raise RunFolderError(f"{str(run)!r} has no checkpoint of step {checkpoint}; it has: {steps}")
    if not holds_model(found[step]):
        raise RunFolderError(
            f"{found[step]} holds no model, only the learner's state; make one with `relax-gym export {found[step]} "
            "OUT` and give --checkpoint OUT"
        )
    return found[step]
