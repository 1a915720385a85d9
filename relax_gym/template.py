"""One tokenizer's chat template: messages to text, text to token ids, and what the template can and cannot express.

Nothing is assumed about a template. It is asked: sentinels are rendered, and what comes out decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from relax_gym.errors import TemplateError
from relax_gym.media.items import Kind
from relax_gym.messages import Dialect, adapt, check_media, common_prefix, content_text, hidden, roles, squash, unseen
from relax_gym.types import Message, Tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from relax_gym.config import ChatConfig

SENTINEL = "RelaxSentinel"
NAME, KEY, VALUE = "probe_name", "probe_key", "probe_value"
PROBE_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {KEY: {"type": "string", "description": "A probe."}},
            "required": [KEY],
        },
    },
}
THOUGHT = "<think>\nA thought.\n</think>\n\n"
OPENED_THINKING = re.compile(r"<think>\s*\Z")

# Noncharacters: no tokenizer knows them and no text in interchange has them.
_START, _END = "\ufdd0", "\ufdd1"
UNSHIELDED = f"(?<!{_START})"
"""Pattern that matches before a special token which is not the look-alike of one in a message."""
_BOUNDARY_PROBES = ("Yes", "1", "a.", "a ", "a\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateReport:
    """What a chat template does, found by rendering sentinels.

    Attributes:
        content_form: whether it wants content as a string or as a list of typed parts.
        prefix_preserving: earlier turns are rendered as they were said and change nothing in later ones, so that an
            episode is one segment and a turn costs only its new messages.
        keeps_thinking: the same for answers with `<think>…</think>`.
        opens_thinking: its generation prompt ends with `<think>`.
        supports_system: it has a system role; otherwise system text goes in front of the next user message.
        supports_tools, supports_tool_role, supports_tool_calls: it shows tool schemas, messages of role "tool", and
            structured `tool_calls` of assistant messages.
        turn_end: the token it writes after an answer, None when it writes none.
        boundary_exact: no token of what follows an answer would merge with the answer's last token.
    """

    content_form: Literal["string", "parts"]
    prefix_preserving: bool
    keeps_thinking: bool
    opens_thinking: bool
    supports_system: bool
    supports_tools: bool
    supports_tool_role: bool
    supports_tool_calls: bool
    turn_end: str | None
    boundary_exact: bool


class ChatTemplate:
    """Renders with one tokenizer, one template and one set of template kwargs; the same in every call.

    Attributes:
        dialect: how messages must be written for this template.
        opens_thinking: whether its generation prompt ends with `<think>`.
        turn_end_id: the token that it writes after an answer, None when it writes none.
        answer_lead: white space that it writes between the generation prompt and an answer.

    Raises:
        TemplateError: there is no template, or it shows no user or no assistant messages.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, config: ChatConfig, media: Mapping[Kind, str] | None = None
    ) -> None:
        """`media` are the kinds that the model reads, each with the text that the template writes for it."""
        self.tokenizer, self.config, self._media = tokenizer, config, dict(media or {})
        self._source = _source(tokenizer, config)
        added = tokenizer.added_tokens_decoder
        names = {token.content for token in added.values() if token.special} | set(tokenizer.all_special_tokens)
        self._special_ids = {id for id, token in added.items() if token.content in names}
        names |= set(self._media.values())  # a placeholder need not be a token
        pattern = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        self._special = re.compile(pattern) if names else None
        self._shielded = re.compile(f"{_START}({pattern}){_END}")
        self._anchor = next(
            (t.content for t in added.values() if t.special and not (t.rstrip or t.single_word or t.normalized)), ""
        )
        self.dialect = self._probe_dialect()
        self._probe_answer()

    @property
    def name(self) -> str:
        """Where the template is from, for messages."""
        return str(self.tokenizer.name_or_path or "this tokenizer") if self._source is None else "chat.template"

    # Text

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, prompt: bool = True) -> str:
        """The text of adapted messages, with the generation prompt unless `prompt` is False.

        Raises:
            TemplateError: the template refuses these messages.
        """
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tools=list(tools) or None,
                    chat_template=self._source,
                    add_generation_prompt=prompt,
                    tokenize=False,
                    **self.config.template_kwargs,
                )
            )
        except Exception as error:  # A template is a program of a third party: it can raise anything.
            raise TemplateError(
                f"the chat template of {self.name} refuses these messages (roles: {roles(messages)}): {error}. Change "
                "what the environment returns to what the template allows, or give another template in chat.template"
            ) from error

    def continuation(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """The text between the end of an answer and the start of the next, turn end and generation prompt included.

        It is what follows a sentinel answer, so nothing a template puts in front of an answer gets into it.
        """
        rendered = self.render([*self._say(user=SENTINEL[::-1], assistant=SENTINEL), *messages], tools)
        _, found, text = rendered.partition(SENTINEL)
        if not found:
            raise TemplateError(
                f"the chat template of {self.name} drops assistant messages; give another one in chat.template"
            )
        return text

    def check_shown(
        self, messages: Sequence[Message], text: str, render: Callable[[Sequence[Message]], str], past: int = 0
    ) -> None:
        """Raise TemplateError when a system or user message is not in `text`, which `render` has made of the messages.

        Another text in its place tells whether the template shows it, as it may change what a message says. The first
        `past` messages are earlier turns: a template may forget all of them but system messages.
        """
        for index in unseen(messages, text):
            role = messages[index]["role"]
            probe = [*messages[:index], *self._say(**{role: VALUE}), *messages[index + 1 :]]
            if (index >= past or role == "system") and VALUE not in render(probe):
                raise TemplateError(hidden(messages, role, self.name))

    def adapt(self, messages: Sequence[Message], preamble: str = "") -> list[Message]:
        """Messages as this template wants them; `preamble` becomes part of the system message.

        Raises:
            TemplateError: the template does not show such messages, or the model does not read their media.
        """
        check_media(messages, frozenset(self._media))
        flat: list[Message] = [{**message, "content": content_text(message)} for message in messages]
        return adapt([self._shield(message) for message in flat], self.dialect, preamble=preamble, name=self.name)

    def answer(self, text: str) -> Message:
        """An assistant message as this template wants it."""
        return self._say(assistant=text)[0]

    def _say(self, **texts: str) -> list[Message]:
        return [{"role": role, "content": self.dialect.content(text)} for role, text in texts.items()]

    # Ids

    def encode(self, text: str, *, start: bool = False) -> list[int]:
        """Ids of rendered text; special-token look-alikes that came in messages are encoded as plain text.

        `start`: the text begins the sequence. Otherwise nothing that a tokenizer does at the beginning is done.
        """
        if _START not in text and _END not in text:
            return self._encode_plain(text, anchored=not start)
        ids: list[int] = []
        for index, piece in enumerate(self._shielded.split(text)):
            piece = piece.replace(_START, "").replace(_END, "")  # Left over when a template cuts through a shield.
            if index % 2:
                ids += self.tokenizer.encode(piece, add_special_tokens=False, split_special_tokens=True)
            elif piece:
                ids += self._encode_plain(piece, anchored=index > 0 or not start)
        return ids

    def _encode_plain(self, text: str, *, anchored: bool) -> list[int]:
        anchor = self._anchor if anchored else ""
        ids: list[int] = self.tokenizer.encode(anchor + text, add_special_tokens=False)
        return ids[1:] if anchor else ids

    def special_ids(self, text: str) -> set[int]:
        """The special tokens in rendered text."""
        return self._special_ids.intersection(self.encode(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text if isinstance(text, str) else "".join(text)

    def said(self, token_ids: Sequence[int], text: str) -> str:
        """`text`, decoded from the ids, such that `encode` gives special tokens only where the ids have them."""
        if self._special is None or not self._special.search(text):
            return text
        runs = groupby(token_ids, key=self._special_ids.__contains__)
        return "".join(
            self.decode(list(run)) if special else self._shield_text(self.decode(list(run))) for special, run in runs
        )

    def _shield(self, message: Message) -> Message:
        # Worked examples of assistant messages are written for the model's own format, special tokens included.
        if message["role"] == "assistant":
            return message
        return {**message, "content": self._shield_text(message["content"])}

    def _shield_text(self, text: str) -> str:
        return self._special.sub(rf"{_START}\g<0>{_END}", text) if self._special else text

    # Probes

    def shows(self, messages: Sequence[Message], *texts: str, tools: Sequence[Tool] = (), prompt: bool = True) -> bool:
        """Whether the template renders these messages and every text is in what comes out."""
        try:
            rendered = self.render(messages, tools, prompt=prompt)
        except TemplateError:
            return False
        # A quoted key is a Python repr: the template printed a structure it does not understand.
        return all(text in rendered for text in texts) and f"'{KEY}'" not in rendered

    def rewrites(self, tools: Sequence[Tool] = (), *, thinking: bool) -> list[bool]:
        """For some conversations with these tools, whether a continuation depends on more than the new messages."""
        return [self._rewrites(script, tools, thinking) for script in self._scripts(tools)]

    def _rewrites(self, script: Sequence[Sequence[Message]], tools: Sequence[Tool], thinking: bool) -> bool:
        transcript = Transcript(self, tools)
        try:
            for index, observation in enumerate(script):
                text, rewritten = transcript.observe(observation)
                if rewritten or (index > 0 and text != self.continuation(observation, tools)):
                    return True
                transcript.complete((THOUGHT if thinking else "") + "An answer.")
        except TemplateError:
            pass  # A conversation that cannot be expressed is refused when an environment has it.
        return False

    def _scripts(self, tools: Sequence[Tool]) -> Iterable[Sequence[Sequence[Message]]]:
        ask, go_on = self._say(user="A question."), self._say(user="Go on.")
        yield ask, go_on, ask
        if self.dialect.supports_system:
            yield self._say(system="A rule.", user="A question."), go_on
        if tools and self.dialect.supports_tool_role:
            result = self.adapt([{"role": "tool", "name": NAME, "content": "A result."}])
            yield ask, result, result
            yield ask, result, go_on
        for kind in self._media:  # Some templates number them.
            shown = self.adapt([{"role": "user", "content": [{"type": kind}, {"type": "text", "text": "What is it?"}]}])
            yield shown, shown

    def _probe_dialect(self) -> Dialect:
        forms: list[Literal["string", "parts"]] = ["string", "parts"]
        for form in forms:
            self.dialect = Dialect(content_form=form)
            if self.shows(self._say(user=SENTINEL), SENTINEL):
                return self._probe_roles().replace(tool_role=self.config.tool_role)
        self.render(self._say(user=SENTINEL))
        raise TemplateError(
            f"the chat template of {self.name} shows no user messages; give another one in chat.template"
        )

    def _probe_roles(self) -> Dialect:
        form, turn = self.dialect.content_form, self._say(user="A question.")
        supports_tools = self.shows(turn, NAME, KEY, tools=[PROBE_TOOL])
        tools = [PROBE_TOOL] if supports_tools else []
        dialect = Dialect(
            content_form=form,
            supports_system=self.shows(self._say(system=SENTINEL, user="A question."), SENTINEL),
            supports_tools=supports_tools,
        )
        turn += self._say(assistant="An answer.")
        for ids in (False, True):
            candidate = dialect.replace(supports_tool_role=True, needs_tool_ids=ids)
            result = adapt([{"role": "tool", "content": SENTINEL}], candidate, name=self.name)
            if self.shows(turn + result, SENTINEL, tools=tools):
                dialect = candidate
                break
        call = {"id": "probecall", "type": "function", "function": {"name": NAME, "arguments": {KEY: VALUE}}}
        for empty, as_json in product((None, ""), (False, True)):
            candidate = dialect.replace(supports_tool_calls=True, empty_content=empty, json_arguments=as_json)
            message: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
            calling = [turn[0], *adapt([message], candidate, name=self.name)]
            shown = self.shows(calling, NAME, KEY, VALUE, tools=tools, prompt=False)
            if shown and (empty is not None or "None" not in self.render(calling, tools, prompt=False)):
                return candidate
        return dialect

    def _probe_answer(self) -> None:
        messages = self._say(user="A question.", assistant=SENTINEL)
        try:
            head, _, tail = self.render(messages, prompt=False).partition(SENTINEL)
            following = self.continuation(messages[:1])
        except TemplateError:
            head = tail = following = ""  # Good for one turn only: a second one is refused when it comes.
        added = self.tokenizer.added_tokens_decoder
        tail_ids = self.encode(common_prefix(tail, following))
        self.turn_end_at = next((index for index, id in enumerate(tail_ids) if id in added), 0)
        self.turn_end_id = next((id for id in tail_ids if id in added), None)
        prompt = self.render(messages[:1])
        lead = head.removeprefix(prompt) if head.startswith(prompt) else ""
        self.answer_lead = lead if lead.isspace() else ""
        self.opens_thinking = OPENED_THINKING.search(prompt) is not None
        ids = self.encode(following)
        self.boundary_exact = all(self.encode(text + following) == self.encode(text) + ids for text in _BOUNDARY_PROBES)


class Transcript:
    """A conversation as text, compared at every step with what the template makes of its whole history.

    Differences in white space are none: a template that trims or pads an answer does not rewrite it.
    """

    def __init__(self, template: ChatTemplate, tools: Sequence[Tool]) -> None:
        self._template, self._tools = template, tools
        self._history: list[Message] = []
        self._answer = self._seen = self._opened = ""

    def observe(self, messages: Sequence[Message]) -> tuple[str, bool]:
        """The text to append and False; or the whole text and True when the template has rewritten the past.

        Raises:
            TemplateError: the template refuses the messages; the transcript is as before.
        """
        past = [*self._history, self._template.answer(self._answer)] if self._history else []
        following = self._following(messages) if past else None
        history, rewritten = [*past, *messages], bool(past) and following is None
        if following is None:
            render = partial(self._template.render, tools=self._tools)
            text = render(history)
            self._template.check_shown(history, text, render, past=len(past))
        else:
            text = following
            self._template.check_shown(messages, text, partial(self._template.continuation, tools=self._tools))
        opened = OPENED_THINKING.search(text)
        self._opened = opened.group() if opened else ""
        self._seen = squash(text) if rewritten else self._seen + squash(text)
        self._history = history
        return text, rewritten

    def complete(self, text: str) -> None:
        """Take what the model said, without its turn end."""
        self._seen += squash(text)
        self._answer = self._opened + text

    def _following(self, messages: Sequence[Message]) -> str | None:
        """What comes after the last answer when the template renders all before it as it was said, None otherwise."""
        marked = self._template.answer(self._answer + SENTINEL)
        try:
            rendered = self._template.render([*self._history, marked, *messages], self._tools)
        except TemplateError:
            # Each step is allowed but not their sum (alternation is counted over tool turns): all there is to do is
            # to go on from the ids the model saw.
            return self._template.continuation(messages, self._tools)
        before, found, after = rendered.partition(SENTINEL)
        if not found:
            self._template.continuation(messages, self._tools)  # Raises when it drops whatever an assistant says.
        return after if found and squash(before) == self._seen else None


def _source(tokenizer: PreTrainedTokenizerBase, config: ChatConfig) -> str | None:
    """The configured template's Jinja source, None for the tokenizer's own."""
    given = config.template
    if given is None:
        if not tokenizer.chat_template:
            raise TemplateError(
                f"{tokenizer.name_or_path or 'this tokenizer'} has no chat template (a base model?); give one in "
                "chat.template, as Jinja text or as a path to a file"
            )
        return None
    if "{" in given or "\n" in given:
        return given
    path = Path(given).expanduser()
    if not path.is_file():
        raise TemplateError(f"chat.template = {given!r} is neither Jinja text (it has no '{{') nor a file")
    return path.read_text(encoding="utf-8")
