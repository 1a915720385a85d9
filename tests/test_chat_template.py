"""What templates refuse, what is reported of them, and what the environment gets."""

from __future__ import annotations

from pathlib import Path

import pytest
from chat_fixtures import (
    CALL,
    ONE,
    THOUGHT,
    play,
    renderer_of,
    system,
    text_of,
    tokenizer_of,
    user,
)

from relax_gym.chat import ChatRenderer
from relax_gym.config import ChatConfig
from relax_gym.errors import TemplateError
from relax_gym.template import TemplateReport

# Templates that refuse, templates that are missing


def test_template_that_raises_is_quoted() -> None:
    with pytest.raises(TemplateError) as raised:
        renderer_of("gemma").conversation().observe([user("Hi"), user("Ho")])
    assert str(raised.value) == (
        "the chat template of gemma refuses these messages (roles: user, user): Conversation roles must alternate "
        "user/assistant/user/assistant/.... Change what the environment returns to what the template allows, or give "
        "another template in chat.template"
    )


def test_refused_observation_leaves_the_conversation_as_it_was() -> None:
    for family in ("gemma", "mistral"):
        renderer = renderer_of(family)
        conversation, _ = play(renderer, [[user("Hi")], "Yo"])
        before = list(conversation.token_ids)
        with pytest.raises(TemplateError, match="must alternate"):
            conversation.observe([user("A"), user("B")])
        assert conversation.token_ids == before
        assert text_of(renderer, conversation.observe([user("B")]).context_ids).count("B") == 1


def test_system_text_joins_the_user_message_where_there_is_no_system_role() -> None:
    renderer = renderer_of("gemma")
    assert not renderer.report().supports_system
    conversation, _ = play(renderer, [[system("Be brief."), user("Hi")]])
    assert text_of(renderer, conversation.token_ids) == (
        "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n"
    )


def test_missing_template() -> None:
    tokenizer = tokenizer_of("qwen25")
    tokenizer.chat_template = None
    with pytest.raises(TemplateError, match=r"qwen25 has no chat template .* give one in chat\.template"):
        ChatRenderer(tokenizer)


def test_configured_template_is_text_or_a_path(tmp_path: Path) -> None:
    source = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    path = tmp_path / "mine.jinja"
    path.write_text(source)
    for template in (source, str(path)):
        renderer = renderer_of("qwen25", template=template)
        assert text_of(renderer, play(renderer, ONE)[0].token_ids) == "[Hi]"
    with pytest.raises(TemplateError, match=r"'nowhere\.jinja' is neither Jinja text .* nor a file"):
        renderer_of("qwen25", template="nowhere.jinja")


@pytest.mark.parametrize(
    ("template", "message"),
    [("{{ nothing.at.all }}", "refuses these messages"), ("{{ 'x' }}", "shows no user messages"), ("{% if", "refuses")],
)
def test_broken_template(template: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        renderer_of("qwen25", template=template)


def test_first_observation_must_say_something() -> None:
    with pytest.raises(TemplateError, match="the first observation has no messages"):
        renderer_of("qwen25").conversation().observe([])


def test_observe_and_complete_alternate() -> None:
    conversation = renderer_of("qwen25").conversation()
    with pytest.raises(RuntimeError, match=r"complete\(\) was called without observe"):
        conversation.complete([1])
    conversation.observe([user("Hi")])
    with pytest.raises(RuntimeError, match=r"observe\(\) was called twice"):
        conversation.observe([user("Hi")])


def test_call_with_broken_arguments() -> None:
    call = {**CALL, "tool_calls": [{"function": {"name": "weather", "arguments": "{city"}}]}
    with pytest.raises(TemplateError, match=r"arguments '\{city'; they must be a mapping or its JSON text"):
        renderer_of("qwen25").conversation().observe([user("Hi"), call])


# What the environment gets


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("left", "left"),
        (" left\n", " left\n"),
        (THOUGHT + "left", "left"),
        ("Hm.</think>\n\nleft", "left"),
        ("<think>a</think>left<think>b</think> right", "leftright"),
        ("<think>never ends", ""),
        ("so <think>never ends", "so "),
    ],
)
def test_action_without_thinking(text: str, action: str) -> None:
    assert renderer_of("qwen3").action(text) == action
    assert renderer_of("qwen3", strip_thinking=False).action(text) == text


def test_action_after_a_prompt_that_opened_thinking() -> None:
    renderer = renderer_of("deepseek_r1")
    assert renderer.action("Hm.\n</think>\n\nleft") == "left"
    assert renderer.action("<think>Hm.</think>left") == "left"
    assert renderer.action("never ends") == ""
    assert renderer.action("no thinking after a tool", opened=False) == "no thinking after a tool"


def test_action_ends_at_the_first_stop_string() -> None:
    renderer = renderer_of("qwen25")
    assert renderer.action("a;b|c", ["|", ";", "", "z"]) == "a"
    assert renderer.action("<think>;</think>a", [";"]) == ""


def test_decode_keeps_special_tokens_but_the_turn_end() -> None:
    renderer = renderer_of("mistral")
    ids = renderer.encode_answer('[TOOL_CALLS] [{"name": "weather"}]')
    assert ids[-1] == 352
    assert "[TOOL_CALLS]" in renderer.tokenizer.convert_ids_to_tokens(list(ids))
    assert renderer.decode(ids).strip() == '[TOOL_CALLS] [{"name": "weather"}]'
    assert renderer_of("qwen25").decode([56, 78, 256, 256]) == "Yo"


# What is reported

REPORTS = {
    "qwen25": ("string", True, True, False, True, True, True, True, "<|im_end|>", True),
    "qwen3": ("string", False, False, False, True, True, True, True, "<|im_end|>", True),
    "llama3_plain": ("string", True, True, False, True, False, True, False, "<|eot_id|>", True),
    "gemma": ("string", True, True, False, False, False, False, False, "<end_of_turn>", True),
    "mistral": ("string", False, True, False, True, True, True, True, "</s>", True),
    "deepseek_r1": ("string", False, False, True, True, False, True, True, "<｜end▁of▁sentence｜>", True),
    "phi3": ("string", True, True, False, True, False, False, False, "<|end|>", True),
    "parts": ("parts", True, True, False, True, False, True, False, "<|im_end|>", True),
}


@pytest.mark.parametrize("family", sorted(REPORTS))
def test_report(family: str) -> None:
    report = renderer_of(family).report()
    assert tuple(getattr(report, field) for field in TemplateReport.__dataclass_fields__) == REPORTS[family]


def test_stop_ids_are_the_turn_end_then_eos_then_extras() -> None:
    assert renderer_of("llama3_plain").stop_token_ids == (260, 257)
    assert ChatRenderer(tokenizer_of("llama3_plain"), ChatConfig(), extra_stop_token_ids=[9]).stop_token_ids == (
        260,
        257,
        9,
    )
