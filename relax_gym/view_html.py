"""Episodes of a run as one HTML page that needs nothing else: media inside, tokens coloured, no script."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING

from relax_gym.errors import RunFolderError
from relax_gym.media.files import MIME
from relax_gym.view import MAX_REPEATS, Record, pieces, printable, sureness, token_facts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

POLICY = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'"
STYLE = (Path(__file__).parent / "view.css").read_text(encoding="utf-8")
LEGEND = (
    ("context", "fed to the model, loss mask 0"),
    ("sure", "sampled, probability at least 1/2"),
    ("doubtful", "at least 1/20"),
    ("unlikely", "less"),
)
UNITS = {"frames": "frames", "seconds": "s", "fps": "fps", "rate": "Hz"}
SMALLEST = {"image": 160, "video": 280}  # pixels of the longer side: smaller ones are shown enlarged
WIDEST, HIGHEST = 640, 420


def render_page(run: Path, records: Sequence[Record], tokenizer: PreTrainedTokenizerBase | None) -> str:
    """One page of these episodes. Whatever a model or an env wrote is text in it and nothing else."""
    title = f"{_text(run.resolve().name)} · {len(records)} episode{'s' * (len(records) != 1)}"
    legend = "".join(f'<li><span class="token {kind}">token</span> {meaning}</li>' for kind, meaning in LEGEND)
    legend += "<li>Point at a token for its id and log-prob.</li>"
    if tokenizer is None:
        legend = "<li>The tokenizer is not here: text is shown instead of tokens.</li>"
    media = _MediaElements(run, records)
    body = "\n".join(_episode(media, record, tokenizer, opened=number == 0) for number, record in enumerate(records))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title><style>{STYLE}</style></head>\n'
        f'<body><header><h1>{title}</h1><ul class="legend">{legend}</ul></header>\n'
        f"<main>{body}</main>{media.shared()}</body></html>\n"
    )


def write_page(file: Path, run: Path, records: Sequence[Record], tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Write that page; return how many bytes it has.

    Raises:
        RunFolderError: the file cannot be written.
    """
    page = render_page(run, records, tokenizer).encode()
    try:
        file.write_bytes(page)
    except OSError as error:
        raise RunFolderError(f"cannot write {str(file)!r}: {error.strerror}; give --html another file") from error
    return len(page)


def _text(value: object) -> str:
    """Text that is shown as it is and can do nothing."""
    return escape(printable(str(value)))


def _row(label: str, content: str) -> str:
    return f'<div class="row"><span class="label">{_text(label)}</span><div>{content}</div></div>'


def _episode(media: _MediaElements, record: Record, tokenizer: PreTrainedTokenizerBase | None, *, opened: bool) -> str:
    facts = (
        record["env_id"],
        f"seed {record['seed']}",
        f"step {record['step']}",
        record["kind"],
        record["stop_reason"],
    )
    turns = "".join(_turn(media, turn, number, tokenizer) for number, turn in enumerate(record["turns"], start=1))
    last = _messages(media, record["final_observation"])
    return (
        f"<details{' open' * opened}><summary><b>{_text(record['episode_id'])}</b> {_reward(record['reward'])} "
        f'<span class="facts">{_text(" · ".join(facts))}</span></summary>{_rewards(record)}{turns}'
        f"{f'<section><h2>Final observation</h2>{last}</section>' if last else ''}{_error(record)}</details>"
    )


def _reward(value: float | None, unknown: str = "unscored") -> str:
    return f'<span class="reward">{unknown if value is None else f"reward {value:.4g}"}</span>'


def _rewards(record: Record) -> str:
    """What the reward is made of, other numbers that its parts gave, and why one could not score."""
    failures = record.get("reward_failures", {})
    parts = {**record["rewards"], **record.get("reward_parts", {})}
    items = "".join(f"<li>{_text(name)} {_score(value, failures.get(name))}</li>" for name, value in parts.items())
    return f'<ul class="rewards">{items}</ul>'


def _score(value: float | None, failure: str | None) -> str:
    return f"<b>unscored</b> {_text(failure or '')}" if value is None else f"<b>{value:.4g}</b>"


def _turn(media: _MediaElements, turn: Record, number: int, tokenizer: PreTrainedTokenizerBase | None) -> str:
    facts = f"{token_facts(turn)} · finish {turn['finish_reason']}"
    segment = (
        '<p class="note">New segment: this prompt does not extend the one before.</p>' if turn["new_segment"] else ""
    )
    if tokenizer is None:
        said = _row("model", f'<div class="tokens">{_text(turn["text"])}</div>')
    else:
        said = _row("tokens", f'<div class="tokens">{"".join(_tokens(turn, tokenizer))}</div>')
    return (
        f"<section><h2>Turn {number} {_reward(turn['reward'], 'the env did not answer')} "
        f'<span class="facts">{_text(facts)}</span></h2>'
        f"{_messages(media, turn['observation'])}{segment}{said}</section>"
    )


def _tokens(turn: Record, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Each token as a span that says its id and log-prob; runs of the same one in short."""
    fed, said, logprobs = turn["context_ids"], turn["token_ids"], [value or 0.0 for value in turn["logprobs"]]
    shown = [(text, "context", f"id {_ids(fed, at)}") for text, at in pieces(fed, tokenizer)]
    for text, at in pieces(said, tokenizer):
        hint = f"id {_ids(said, at)}, log-prob {sum(logprobs[at]):.4f}"
        shown.append((text, sureness(min(logprobs[at])), hint))
    for (text, kind, hint), same in groupby(shown):
        count = len(list(same))
        repeated = count > MAX_REPEATS and len(text.strip()) > 1
        token = _text(text).replace("\n", "<i>\n</i>") + f"×{count}" * repeated
        yield f'<span class="token {kind}" title="{_text(hint)}">{token}</span>' * (1 if repeated else count)


def _ids(ids: Sequence[int], at: slice) -> str:
    return " ".join(map(str, ids[at]))


def _messages(media: _MediaElements, messages: Sequence[Record]) -> str:
    return "".join(_row(message["role"], _content(media, message)) for message in messages)


def _content(media: _MediaElements, message: Record) -> str:
    content = message.get("content") or ""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    calls = [json.dumps(call, ensure_ascii=False) for call in message.get("tool_calls") or ()]
    shown = [f"<p>{_text(part['text'])}</p>" if part.get("type") == "text" else media.element(part) for part in parts]
    return "".join([*shown, *(f"<p><code>{_text(call)}</code></p>" for call in calls)])


def _error(record: Record) -> str:
    error = record["error"]
    if not error:
        return ""
    where = f"error at turn {error['turn']}: {error['message']}"
    return f'<section class="error"><h2>{_text(where)}</h2><pre>{_text(error["traceback"])}</pre></section>'


class _MediaElements:
    """Media of a run folder as elements of a page. An image that is shown several times is in the page once."""

    def __init__(self, run: Path, records: Sequence[Record]) -> None:
        self._run = run
        self._times_shown = Counter(_files(records))
        self._shared: dict[str, str] = {}

    def element(self, part: Record) -> str:
        """A part of a message that is no text."""
        kind = str(part.get("type"))
        kept = part.get(kind)
        if not isinstance(kept, dict) or "file" not in kept:
            return f'<p class="note">{_text(kind)}: {_text(kept)}</p>'
        file = self._run / str(kept["file"])
        caption = _text(" · ".join(_facts(kept)))
        if file.parent != self._run / "media" or file.suffix[1:] not in MIME or not file.is_file():
            return f'<p class="note">{_text(kind)} ({caption}) was not kept</p>'
        return f"<figure>{self._playable(kind, file, kept)}<figcaption>{caption}</figcaption></figure>"

    def shared(self) -> str:
        """The images that elements refer to."""
        return f'<svg width="0" height="0" aria-hidden="true"><defs>{"".join(self._shared.values())}</defs></svg>'

    def _playable(self, kind: str, file: Path, kept: Record) -> str:
        mime = MIME[file.suffix[1:]]
        data = f"data:{mime};base64,"
        if mime.startswith("audio"):
            return f'<audio controls src="{data}{_base64(file)}"></audio>'
        size, zoomed = _display_size(kept, SMALLEST["video" if mime.startswith("video") else "image"])
        if mime.startswith("video"):
            return f'<video controls loop {size} {zoomed} src="{data}{_base64(file)}"></video>'
        if self._times_shown[str(kept["file"])] == 1:
            return f'<img alt="{_text(kind)}" {size} {zoomed} src="{data}{_base64(file)}">'
        name, area = _text(file.stem), f'width="{int(kept["width"])}" height="{int(kept["height"])}"'
        if name not in self._shared:
            self._shared[name] = f'<image id="{name}" {area} href="{data}{_base64(file)}"/>'
        box = f'viewBox="0 0 {int(kept["width"])} {int(kept["height"])}"'
        return f'<svg role="img" aria-label="{_text(kind)}" {size} {zoomed} {box}><use href="#{name}"/></svg>'


def _files(records: Sequence[Record]) -> Iterator[str]:
    for record in records:
        observations = [*(turn["observation"] for turn in record["turns"]), record["final_observation"]]
        for message in chain.from_iterable(observations):
            for part in message["content"] if isinstance(message.get("content"), list) else ():
                kept = part.get(str(part.get("type")))
                if isinstance(kept, dict):
                    yield str(kept.get("file"))


def _facts(kept: Record) -> Iterator[str]:
    if "width" in kept:
        yield f"{kept['width']} × {kept['height']}"
    for key, unit in UNITS.items():
        if key in kept:
            yield f"{kept[key]:.4g} {unit}" if key != "rate" else f"{kept[key]} {unit}"
    if kept.get("sound"):
        yield "with sound"


def _display_size(kept: Record, smallest: int) -> tuple[str, str]:
    """Attributes: how large it is shown, and that its pixels stay sharp if it is enlarged."""
    width, height = int(kept["width"]), int(kept["height"])
    scale = min(max(1, smallest // max(width, height)), WIDEST / width, HIGHEST / height)
    size = f'width="{max(1, round(width * scale))}" height="{max(1, round(height * scale))}"'
    return size, 'class="zoomed"' * (scale > 1)


def _base64(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()
