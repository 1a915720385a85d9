"""Messages to token ids, turn by turn. What the model sampled stays as it was sampled; text is for people and envs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relax_gym.config import ChatConfig
from relax_gym.errors import TemplateError
from relax_gym.media.items import Media
from relax_gym.messages import describe_tools, dropped
from relax_gym.template import OPENED_THINKING, PROBE_TOOL, UNSHIELDED, ChatTemplate, TemplateReport, Transcript
from relax_gym.types import Message, Placed, Tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from relax_gym.processing import MediaProcessor

log = logging.getLogger(__name__)

PROMPT_END = 32
"""Ids at the end of a prompt that tell whether it opens thinking."""
_THINKING = re.compile(r"<think>.*?(?:</think>\s*|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What to feed next.

    `context_ids` follow the ids so far. When `new_segment` they replace them: the template rewrote an earlier turn, so
    the whole conversation was rendered anew. The first prompt is no new segment. `media` are in `context_ids`.
    """

    context_ids: tuple[int, ...]
    new_segment: bool
    media: tuple[Placed, ...] = ()


class ChatRenderer:
    """Turns messages into token ids with one tokenizer and its chat template. One renderer serves all conversations.

    Args:
        tokenizer: any Hugging Face tokenizer.
        config: template, template kwargs, thinking and tool role; the defaults when None.
        extra_stop_token_ids: more ids that end a turn, such as those of a model's generation config.
        processor: what makes ids of images, videos and audio; None for a model that reads text only.

    Raises:
        TemplateError: there is no chat template, or it shows no user messages.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: ChatConfig | None = None,
        *,
        extra_stop_token_ids: Sequence[int] = (),
        processor: MediaProcessor | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.processor = processor
        self.config = config or ChatConfig()
        self.template = ChatTemplate(tokenizer, self.config, processor.tokens if processor else None)
        candidates = (self.template.turn_end_id, tokenizer.eos_token_id, *extra_stop_token_ids)
        self._stop_token_ids = tuple(dict.fromkeys(int(id) for id in candidates if id is not None))
        self._preserving: dict[str, bool] = {}
        self._warned = False

    @functools.cached_property
    def never_sampled(self) -> dict[int, float]:
        """A logit bias of -inf for every special token that comes with media: one that was sampled would stand for an
        image, a video or audio that is not there."""
        if self.processor is None:
            return {}
        plain = self.template.render(self.template.adapt([{"role": "user", "content": "?"}]))
        ids = set(self.processor.placeholder_ids.tolist())
        for kind in self.processor.tokens:
            message: Message = {"role": "user", "content": [{"type": kind}, {"type": "text", "text": "?"}]}
            with contextlib.suppress(TemplateError):  # a template need not show all that the processor reads
                shown = self.template.render(self.template.adapt([message]))
                ids |= self.template.special_ids(shown) - self.template.special_ids(plain)
        return dict.fromkeys(sorted(ids), -math.inf)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Every id that ends an assistant turn, the one this template writes (or eos) first."""
        return self._stop_token_ids

    def conversation(self, tools: Sequence[Tool] = ()) -> Conversation:
        """Begin an episode in which the model sees these tools.

        Raises:
            TemplateError: the template does not show tools or their results and `chat.tool_role` is "tool".
        """
        tools, dialect = list(tools), self.template.dialect
        if not tools or dialect.supports_tools:
            shown, preamble = tools, ""
        elif dialect.tool_role == "tool":
            raise TemplateError(dropped("tools", self.template.name))
        else:
            shown, preamble = [], describe_tools(tools)
        if tools and dialect.tool_role == "tool" and not dialect.supports_tool_role:
            raise TemplateError(dropped("messages of role 'tool'", self.template.name))
        return Conversation(self, shown, preamble, follow=not self._keeps_past(shown))

    def decode(self, token_ids: Sequence[int]) -> str:
        """What the model said: without the ids that ended the turn, other special tokens as text."""
        return self.template.decode(self.spoken(token_ids))

    def spoken(self, token_ids: Sequence[int]) -> Sequence[int]:
        """The ids without those at the end that ended the turn."""
        end = len(token_ids)
        while end and token_ids[end - 1] in self._stop_token_ids:
            end -= 1
        return token_ids[:end]

    def action(self, text: str, stop: Sequence[str] = (), *, opened: bool | None = None) -> str:
        """What the environment gets of `text`: what stands before the first stop string, without thinking.

        Thinking stays when `config.strip_thinking` is False. Thinking without an end leaves nothing. `opened` says
        whether the prompt ended with `<think>`; by default what the template's generation prompt does.
        """
        text = text[: min((at for string in stop if string and (at := text.find(string)) >= 0), default=len(text))]
        if not self.config.strip_thinking:
            return text
        return without_thinking(text, opened=self.template.opens_thinking if opened is None else opened)

    def encode_answer(self, text: str, prompt_ids: Sequence[int] = ()) -> tuple[int, ...]:
        """An expert's answer as the ids a policy would sample: the text and the id that ends the turn.

        Thinking that is open at the end of the prompt is closed first, unless the text does it.
        """
        opened = OPENED_THINKING.search(self.template.decode(prompt_ids[-PROMPT_END:]))
        if opened and "</think>" not in text:
            text = "\n</think>\n\n" + text
        return (*self.template.encode(self.template.answer_lead + text), *self._stop_token_ids[:1])

    def report(self) -> TemplateReport:
        """What the template can express, for people."""
        template, dialect = self.template, self.template.dialect
        tools = [[], [PROBE_TOOL]] if dialect.supports_tools else [[]]
        plain = [template.rewrites(used, thinking=False) for used in tools]
        thinking = [template.rewrites(used, thinking=True) for used in tools]
        return TemplateReport(
            content_form=dialect.content_form,
            prefix_preserving=not any(map(any, plain + thinking)),
            keeps_thinking=plain == thinking,
            opens_thinking=template.opens_thinking,
            supports_system=dialect.supports_system,
            supports_tools=dialect.supports_tools,
            supports_tool_role=dialect.supports_tool_role,
            supports_tool_calls=dialect.supports_tool_calls,
            turn_end=None if template.turn_end_id is None else template.decode([template.turn_end_id]),
            boundary_exact=template.boundary_exact,
        )

    def _keeps_past(self, tools: Sequence[Tool]) -> bool:
        """Whether past turns never need to be compared with the template's rendering of them."""
        if self.config.history == "keep":
            return True
        key = json.dumps(tools, sort_keys=True, default=repr)
        if key not in self._preserving:
            self._preserving[key] = not any(any(self.template.rewrites(tools, thinking=on)) for on in (False, True))
        return self._preserving[key]

    def continue_after(self, text: str, last: int | None) -> list[int]:
        """Ids of a continuation after a completion whose last id is `last`.

        The continuation begins with the template's turn end. A model that ended its turn itself has said it already.
        """
        ids = self.template.encode(text)
        head = ids[: self.template.turn_end_at + 1]
        if last in self._stop_token_ids and last in head:
            return ids[head.index(last) + 1 :]
        return ids

    def warn_rewritten(self) -> None:
        """Say once that past turns were rewritten."""
        if not self._warned:
            self._warned = True
            log.warning(
                "the chat template of %s rewrites past turns (most often it deletes their thinking); each time, a new "
                'segment starts and is counted. chat.history = "keep" continues from what the model saw instead',
                self.template.name,
            )


class Conversation:
    """One episode's tokens. `observe` and `complete` alternate, `observe` first.

    Attributes:
        token_ids: the current segment, everything the model has seen and said since it began.
        new_segments: how often the past was rewritten, so that a segment began after the first.
        media: where the current segment has images, videos and audio.
        opened_thinking: whether the last context ended with `<think>`; see `ChatRenderer.action`.
    """

    def __init__(self, renderer: ChatRenderer, tools: Sequence[Tool], preamble: str, *, follow: bool) -> None:
        self.token_ids: list[int] = []
        self.new_segments = 0
        self.media: list[Placed] = []
        self.opened_thinking = False
        self._shown: list[Media] = []
        self._renderer, self._template = renderer, renderer.template
        self._tools, self._preamble = tools, preamble
        self._transcript = Transcript(renderer.template, tools) if follow else None
        self._last: int | None = None
        self._turn = 0
        self._answered = True

    def observe(self, messages: Sequence[Message]) -> Context:
        """Append what the environment said, and the start of the model's answer.

        Raises:
            TemplateError: the template cannot express these messages; the conversation is as before.
        """
        if not self._answered:
            raise RuntimeError("observe() was called twice without complete() between")
        first = self._turn == 0
        adapted = self._template.adapt(messages, self._preamble if first else "")
        if first and not adapted:
            raise TemplateError("the first observation has no messages; an episode begins with at least one")
        text, rewritten = self._text(adapted, first)
        new = media_of(messages)
        afresh = first or rewritten
        context = self._encode(text, [*self._shown, *new] if afresh else new, start=afresh)
        if afresh:
            self.token_ids, self.media = [], []
        self.media += [placed.moved(len(self.token_ids)) for placed in context.media]
        self.token_ids += context.context_ids
        self._shown += new
        if rewritten:
            self.new_segments += 1
            self._renderer.warn_rewritten()
        self._turn += 1
        self._answered = False
        self.opened_thinking = OPENED_THINKING.search(text) is not None
        return dataclasses.replace(context, new_segment=rewritten)

    def _encode(self, text: str, media: Sequence[Media], *, start: bool) -> Context:
        processor = self._renderer.processor
        if processor is not None:
            text = processor.expand(text, media, UNSHIELDED)
        ids = self._template.encode(text, start=True) if start else self._renderer.continue_after(text, self._last)
        placed = processor.place(ids, media) if processor is not None else ()
        return Context(context_ids=tuple(ids), new_segment=False, media=placed)

    def complete(self, token_ids: Sequence[int], text: str | None = None) -> None:
        """Append what the model sampled, exactly as sampled. `text` is `ChatRenderer.decode` of it, when at hand."""
        if self._answered:
            raise RuntimeError("complete() was called without observe() before it")
        self.token_ids.extend(token_ids)
        self._last = token_ids[-1] if len(token_ids) else None
        self._answered = True
        if self._transcript is not None:
            text = self._renderer.decode(token_ids) if text is None else text
            self._transcript.complete(self._template.said(self._renderer.spoken(token_ids), text))

    def _text(self, messages: Sequence[Message], first: bool) -> tuple[str, bool]:
        if self._transcript is not None:
            return self._transcript.observe(messages)
        render = functools.partial(self._template.render if first else self._template.continuation, tools=self._tools)
        text = render(messages)
        self._template.check_shown(messages, text, render)
        return text, False


def without_thinking(text: str, *, opened: bool) -> str:
    """What a model said aloud. Thinking without an end leaves nothing. `opened`: the prompt ended with `<think>`."""
    before, ended, after = text.partition("</think>")
    if ended and (opened or "<think>" not in before):
        text = after.lstrip()
    elif opened:
        return ""
    return _THINKING.sub("", text)


def media_of(messages: Sequence[Message]) -> list[Media]:
    """The loaded images, videos and audio of messages, in order."""
    contents = [message["content"] for message in messages if not isinstance(message.get("content") or "", str)]
    return [part[part["type"]] for content in contents for part in content if part["type"] != "text"]
