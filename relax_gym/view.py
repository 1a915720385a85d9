"""Episodes of a run, for a terminal. Whatever a model or an env wrote is shown as it is and can do nothing."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from relax_gym.errors import RelaxGymError, RunFolderError
from relax_gym.lines import read_lines
from relax_gym.run_folder import list_checkpoints
from relax_gym.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Record = Mapping[str, Any]
"""One line of episodes.jsonl."""

CONTEXT = "dim"
COLOURS = {"sure": "bold green", "doubtful": "bold yellow", "unlikely": "bold red"}
LONGEST_CHARACTER = 4
MAX_REPEATS = 4
QUEUED = "queued"
# Control characters, and the marks that reorder or hide text around them.
UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which episodes to show. None means any; without `step` and `episode`, those of the newest step that has some.

    Without `kind` too, that is the newest step that was trained: what still waited in the queue is left out.
    """

    step: int | None = None
    episode: str | None = None
    kind: str | None = None
    order: str | None = None
    """"best" or "worst" by reward; None keeps the order of the file."""
    limit: int = 3


def printable(text: str) -> str:
    """Text that cannot move the cursor, change colours or reorder what is near: what could becomes \\x1b or \\u202e."""
    return UNPRINTABLE.sub(lambda match: ascii(match.group())[1:-1], text)


def message_text(message: Message) -> str:
    """A message in one string: `role: text`; media as `<image>`, tool calls as JSON."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        parts = [part["text"] if part.get("type") == "text" else f"<{part.get('type')}>" for part in content]
        content = "".join(map(str, parts))
    calls = [json.dumps(call, ensure_ascii=False) for call in message.get("tool_calls") or ()]
    return printable(f"{message['role']}: " + "\n".join(filter(None, [content, *calls])))


def read_episodes(run: Path, wanted: Wanted) -> list[Record]:
    """The episodes of a run folder that were asked for.

    Raises:
        RunFolderError: no such run, or nothing matches; says what there is.
    """
    if not (run / "config.toml").exists():
        raise RunFolderError(
            f"{str(run)!r} is not a run folder: it has no config.toml; give the run_dir of a training run"
        )
    every: list[Record] = list(read_lines(run / "episodes.jsonl"))
    found = [record for record in every if _matches(record, wanted)]
    if wanted.step is None and wanted.episode is None and wanted.kind is None:
        found = [record for record in found if record["kind"] != QUEUED]
    if not found:
        steps = sorted({record["step"] for record in every})
        kinds = ", ".join(sorted({record["kind"] for record in every}))
        there = f"steps {steps[0]} to {steps[-1]} of kind {kinds}" if every else "none yet"
        raise RunFolderError(f"no episode of {str(run)!r} matches; it has {there}")
    if wanted.step is None and wanted.episode is None:
        newest = max(record["step"] for record in found)
        found = [record for record in found if record["step"] == newest]
    if wanted.order is not None:
        found = [record for record in found if record["reward"] is not None] or found
        found.sort(key=lambda record: record["reward"] or 0.0, reverse=wanted.order == "best")
    return found[: wanted.limit]


def _matches(record: Record, wanted: Wanted) -> bool:
    asked = (("step", wanted.step), ("episode_id", wanted.episode), ("kind", wanted.kind))
    return all(value is None or record[key] == value for key, value in asked)


def run_tokenizer(run: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer of the newest checkpoint, else of the config's model; None when it cannot be loaded here."""
    from relax_gym.config import ModelConfig, validate
    from relax_gym.models import load_tokenizer, resolve_model

    checkpoints = list_checkpoints(run)
    try:
        section = tomllib.loads((run / "config.toml").read_text(encoding="utf-8")).get("model", {})
        model = validate(ModelConfig, section, source=str(run / "config.toml"), prefix="model")
        folder = checkpoints[-1][1] if checkpoints else resolve_model(model)
        return load_tokenizer(folder, trust_remote_code=model.trust_remote_code)
    except (RelaxGymError, tomllib.TOMLDecodeError):
        return None  # the run may come from another machine; its text can still be shown


def render_episode(record: Record, tokenizer: PreTrainedTokenizerBase | None) -> Text:
    """One episode: a header, every turn, and how it ended."""
    out = Text()
    head = f"episode {record['episode_id']}  {record['env_id']}  seed {record['seed']}  step {record['step']}"
    out.append(printable(f"── {head}  {record['kind']} ──\n"), style="bold cyan")
    for number, turn in enumerate(record["turns"], start=1):
        out.append(f"turn {number}\n", style="cyan")
        out.append(_turn_tokens(turn, tokenizer) if tokenizer is not None else _turn_text(turn))
        out.append(_turn_facts(turn), style="cyan")
    for message in record["final_observation"]:
        out.append(message_text(message) + "\n", style=CONTEXT)
    out.append(_ending(record))
    return out


def _turn_tokens(turn: Record, tokenizer: PreTrainedTokenizerBase) -> Text:
    out = Text()
    if turn["new_segment"]:
        out.append("[new segment: this prompt does not extend the one before]\n", style="cyan")
    ids, logprobs = turn["token_ids"], [value or 0.0 for value in turn["logprobs"]]
    fed = [(piece, CONTEXT) for piece, _ in pieces(turn["context_ids"], tokenizer)]
    said = [(piece, COLOURS[sureness(min(logprobs[tokens]))]) for piece, tokens in pieces(ids, tokenizer)]
    for (piece, style), same in groupby([*fed, *said]):
        count = len(list(same))
        repeated = count > MAX_REPEATS and len(piece.strip()) > 1  # the hundreds of pads of one image
        out.append(printable(f"{piece}×{count}" if repeated else piece * count), style=style)
    return out.append("\n")


def _turn_text(turn: Record) -> Text:
    out = Text()
    for message in turn["observation"]:
        out.append(message_text(message) + "\n", style=CONTEXT)
    return out.append(printable(f"model: {turn['text']}\n"), style="bold")


def pieces(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, slice]]:
    """Text of each shortest run of tokens that makes whole characters, and which tokens those are."""
    start = 0
    for end in range(1, len(ids) + 1):
        before = ids[max(0, start - 1) : start]  # some tokenizers drop the space of a token that stands alone
        text = str(tokenizer.decode([*before, *ids[start:end]]))[len(str(tokenizer.decode(before))) :]
        if text.endswith("\ufffd") and end - start < LONGEST_CHARACTER and end < len(ids):
            continue
        yield text, slice(start, end)
        start = end


def sureness(logprob: float) -> str:
    """How sure the model was: "sure" is at least 1 in 2, "doubtful" at least 1 in 20, "unlikely" less."""
    return "sure" if logprob >= -0.7 else "doubtful" if logprob >= -3.0 else "unlikely"


def _turn_facts(turn: Record) -> str:
    reward = "the env did not answer" if turn["reward"] is None else f"reward {turn['reward']:g}"
    return f"  {reward}  {token_facts(turn)}  finish {turn['finish_reason']}\n"


def token_facts(turn: Record) -> str:
    """How many tokens of which versions were sampled; an endpoint gives text, not tokens."""
    if not turn["context_ids"]:
        return "text only"
    versions = ", ".join(map(str, sorted(set(turn["versions"]))))
    return f"{len(turn['token_ids'])} tokens of version {versions or '-'}"


def _ending(record: Record) -> Text:
    reward = "unscored" if record["reward"] is None else f"{record['reward']:.4g}"
    parts = [f"{name} {'unscored' if value is None else f'{value:.4g}'}" for name, value in record["rewards"].items()]
    out = Text(printable(f"stop {record['stop_reason']}  reward {reward} ({', '.join(parts)})\n"), style="bold cyan")
    error = record["error"]
    if error:
        out.append(printable(f"error at turn {error['turn']}: {error['message']}\n"), style="bold red")
        out.append(printable(error["traceback"].rstrip() + "\n"), style="red")
        return out
    for name, why in record.get("reward_failures", {}).items():
        out.append(printable(f"reward {name} could not score it: {why}\n"), style="bold red")
    return out
