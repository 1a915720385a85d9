"""Episodes of a run as one HTML page that needs nothing else: media inside, tokens coloured, no script."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_gym.media.files import MIME
from relax_gym.view import MAX_REPEATS, Record, message_text, pieces, printable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

POLICY = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'"
STYLE = (Path(__file__).parent / "view.css").read_text(encoding="utf-8")
SURE, DOUBTFUL = -0.7, -3.0
LEGEND = (
    ("context", "fed to the model, loss mask 0"),
    ("sure", "sampled, probability at least 1/2"),
    ("doubtful", "at least 1/20"),
    ("unlikely", "less"),
)


def render_page(run: Path, records: Sequence[Record], tokenizer: PreTrainedTokenizerBase | None) -> str:
    """One page of these episodes. Whatever a model or an env wrote is text in it and nothing else."""
    title = f"{_text(run.name)} · {len(records)} episode{'s' * (len(records) != 1)}"
    legend = "".join(f'<li><span class="token {kind}">token</span> {meaning}</li>' for kind, meaning in LEGEND)
    body = "\n".join(_episode(run, record, tokenizer, opened=number == 0) for number, record in enumerate(records))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title><style>{STYLE}</style></head>\n'
        f'<body><header><h1>{title}</h1><ul class="legend">{legend}</ul></header>\n<main>{body}</main></body></html>\n'
    )


def _text(value: object) -> str:
    """Text that is shown as it is and can do nothing."""
    return escape(printable(str(value)))


def _episode(run: Path, record: Record, tokenizer: PreTrainedTokenizerBase | None, *, opened: bool) -> str:
    reward = "unscored" if record["reward"] is None else f"{record['reward']:.4g}"
    facts = (
        record["env_id"],
        f"seed {record['seed']}",
        f"step {record['step']}",
        record["kind"],
        record["stop_reason"],
    )
    parts = "".join(
        f"<li>{_text(name)} <b>{'unscored' if value is None else f'{value:.4g}'}</b></li>"
        for name, value in record["rewards"].items()
    )
    turns = "".join(_turn(run, turn, number, tokenizer) for number, turn in enumerate(record["turns"], start=1))
    last = _messages(run, record["final_observation"])
    return (
        f"<details{' open' * opened}><summary><b>{_text(record['episode_id'])}</b> "
        f'<span class="reward">reward {reward}</span> <span class="facts">{_text(" · ".join(facts))}</span></summary>'
        f'<ul class="rewards">{parts}</ul>{turns}'
        f"{f'<section><h2>Final observation</h2>{last}</section>' if last else ''}{_error(record)}</details>"
    )


def _turn(run: Path, turn: Record, number: int, tokenizer: PreTrainedTokenizerBase | None) -> str:
    reward = "the env did not answer" if turn["reward"] is None else f"reward {turn['reward']:g}"
    versions = ", ".join(map(str, sorted(set(turn["versions"])))) or "–"
    facts = f"{reward} · {len(turn['token_ids'])} tokens of version {versions} · finish {turn['finish_reason']}"
    segment = (
        '<p class="note">New segment: this prompt does not extend the one before.</p>' if turn["new_segment"] else ""
    )
    if tokenizer is None:
        said = f'<div class="tokens"><span class="token sure">{_text(turn["text"])}</span></div>'
    else:
        said = f'<div class="tokens">{"".join(_tokens(turn, tokenizer))}</div>'
    return (
        f"<section><h2>Turn {number} <span class=facts>{_text(facts)}</span></h2>"
        f"{_messages(run, turn['observation'])}{segment}{said}</section>"
    )


def _tokens(turn: Record, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Each token as a span that says its id and log-prob; runs of the same one in short."""
    fed, said, logprobs = turn["context_ids"], turn["token_ids"], [value or 0.0 for value in turn["logprobs"]]
    shown = [(text, "context", f"id {_ids(fed, at)}") for text, at in pieces(fed, tokenizer)]
    for text, at in pieces(said, tokenizer):
        logprob = min(logprobs[at])
        kind = "sure" if logprob >= SURE else "doubtful" if logprob >= DOUBTFUL else "unlikely"
        shown.append((text, kind, f"id {_ids(said, at)}, log-prob {sum(logprobs[at]):.4f}"))
    for (text, kind, hint), same in groupby(shown):
        count = len(list(same))
        repeated = count > MAX_REPEATS and len(text.strip()) > 1
        for _ in range(1 if repeated else count):
            yield f'<span class="token {kind}" title="{_text(hint)}">{_text(text)}{f"×{count}" * repeated}</span>'


def _ids(ids: Sequence[int], at: slice) -> str:
    return " ".join(map(str, ids[at]))


def _messages(run: Path, messages: Sequence[Record]) -> str:
    return "".join(
        f'<div class="message"><span class="role">{_text(message["role"])}</span>{_content(run, message)}</div>'
        for message in messages
    )


def _content(run: Path, message: Record) -> str:
    content = message.get("content")
    if not isinstance(content, list):
        return f"<p>{_text(message_text(dict(message)).partition(': ')[2])}</p>"
    return "".join(_part(run, part) for part in content)


def _part(run: Path, part: Record) -> str:
    kind = part.get("type")
    if kind == "text":
        return f"<p>{_text(part['text'])}</p>"
    kept: Any = part.get(str(kind))
    if not isinstance(kept, dict) or not kept.get("file"):
        return f'<p class="note">{_text(kind)}: {_text(kept)}</p>'
    file = run / str(kept["file"])
    facts = " · ".join(f"{key} {value:g}" for key, value in kept.items() if isinstance(value, (int, float)))
    if file.parent != run / "media" or not file.is_file():
        return f'<p class="note">{_text(kind)} ({_text(facts)}) was not kept</p>'
    data = f"data:{MIME[file.suffix[1:]]};base64,{base64.b64encode(file.read_bytes()).decode()}"
    element = {
        "image": f'<img alt="" src="{data}">',
        "audio": f'<audio controls src="{data}"></audio>',
        "video": f'<video controls loop src="{data}"></video>',
    }[str(kind)]
    return f"<figure>{element}<figcaption>{_text(facts)}</figcaption></figure>"


def _error(record: Record) -> str:
    error = record["error"]
    if not error:
        return ""
    where = f"error at turn {error['turn']}: {error['message']}"
    return f'<section class="error"><h2>{_text(where)}</h2><pre>{_text(error["traceback"])}</pre></section>'
