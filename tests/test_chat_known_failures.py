"""Ways in which systems like this one got token ids wrong, each under its number."""

from __future__ import annotations

import logging

import pytest
from chat_fixtures import (
    CALL,
    FAMILIES,
    ONE,
    REST,
    SHOTS,
    THOUGHT,
    THREE,
    TOOL,
    TWO,
    WEATHER,
    Step,
    assistant,
    play,
    renderer_of,
    single_pass,
    system,
    text_of,
    tokenizer_of,
    tool,
    user,
)

from relax_gym.chat import ChatRenderer
from relax_gym.errors import TemplateError
from relax_gym.types import Message, Tool


def test_k2_content_form_is_probed() -> None:
    assert renderer_of("parts").report().content_form == "parts"
    assert renderer_of("qwen25").report().content_form == "string"
    parts: list[Message] = [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}]
    for family in ("parts", "qwen25"):
        conversation, _ = play(renderer_of(family), [parts, "Yo", parts])
        plain, _ = play(renderer_of(family), [[user("Hi")], "Yo", [user("Hi")]])
        assert conversation.token_ids == plain.token_ids


def test_k2_media_is_refused_by_name() -> None:
    part = {"type": "image", "image": "cat.png"}
    with pytest.raises(TemplateError, match=r"a user message has image, but this model reads text only"):
        renderer_of("parts").conversation().observe([{"role": "user", "content": [part]}])


def test_k2_template_for_one_turn_serves_one_turn() -> None:
    renderer = renderer_of("qwen25", template="{{ messages[-1].content }}")
    conversation, _ = play(renderer, ONE)
    assert text_of(renderer, conversation.token_ids) == "Hi"
    conversation.complete([56, 78])
    with pytest.raises(TemplateError, match="drops assistant messages"):
        conversation.observe([user("B")])


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_k3_ids_are_exactly_contexts_and_samples(family: str) -> None:
    renderer = renderer_of(family)
    conversation = renderer.conversation()
    expected: list[int] = []
    for index in range(3):
        context = conversation.observe([user(f"Question {index}")])
        expected = [*(() if context.new_segment else expected), *context.context_ids]
        assert conversation.token_ids == expected
        answer = renderer.encode_answer(f"Answer {index}")
        conversation.complete(answer)
        expected += answer
        assert conversation.token_ids == expected


def test_k4_another_tokenization_of_the_same_text_is_kept() -> None:
    renderer = ChatRenderer(tokenizer_of("qwen25", merges=(("a", "b"),)))
    assert renderer.template.encode("ab") == [256]
    conversation = renderer.conversation()
    conversation.observe([user("Hi")])
    conversation.complete([64, 65, 257])
    context = conversation.observe([user("B")])
    assert not context.new_segment
    assert conversation.token_ids[-len(context.context_ids) - 3 :] == [64, 65, 257, *context.context_ids]


def test_k5_tool_turn_appends_only_its_own_ids() -> None:
    renderer = renderer_of("qwen25")
    _, contexts = play(renderer, TOOL[:3], [WEATHER])
    assert text_of(renderer, contexts[1].context_ids) == (
        "\n<|im_start|>user\n<tool_response>\nsun\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_k6_newline_after_the_turn_end_is_context() -> None:
    _, contexts = play(renderer_of("qwen3"), TWO)
    assert contexts[1].context_ids[:2] == (198, 257)  # "\n<|im_start|>", after the sampled <|im_end|> (256).


def test_k7_deleted_thinking_starts_a_new_segment(caplog: pytest.LogCaptureFixture) -> None:
    renderer = renderer_of("qwen3")
    steps: list[Step] = [[user("Hi")], THOUGHT + "Yo", [user("B")], THOUGHT + "Ya", [user("C")]]
    with caplog.at_level(logging.WARNING, "relax_gym.chat"):
        conversation, contexts = play(renderer, steps)
    assert [context.new_segment for context in contexts] == [False, True, True]
    assert conversation.new_segments == 2
    assert [record.message.split(" rewrites")[0] for record in caplog.records] == ["the chat template of qwen3"]
    assert text_of(renderer, contexts[2].context_ids) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n<|im_start|>user\nB<|im_end|>\n"
        "<|im_start|>assistant\nYa<|im_end|>\n<|im_start|>user\nC<|im_end|>\n<|im_start|>assistant\n"
    )
    assert conversation.token_ids == list(contexts[2].context_ids) == single_pass(renderer, steps)


def test_k7_history_can_be_kept() -> None:
    renderer = renderer_of("qwen3", history="keep")
    conversation, contexts = play(renderer, [[user("Hi")], THOUGHT + "Yo", [user("B")]])
    assert [context.new_segment for context in contexts] == [False, False]
    assert text_of(renderer, conversation.token_ids) == (
        f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{THOUGHT}Yo<|im_end|>{REST}"
    )


def test_k7_thinking_before_a_tool_turn_is_kept_and_before_a_question_not() -> None:
    renderer = renderer_of("qwen3")
    steps: list[Step] = [[user("Sun?")], THOUGHT + "call", [tool("sun")]]
    conversation, contexts = play(renderer, steps, [WEATHER])
    assert [context.new_segment for context in contexts] == [False, False]
    assert conversation.token_ids == single_pass(renderer, steps, [WEATHER])
    conversation.complete(renderer.encode_answer("It is sunny."))
    assert conversation.observe([user("B")]).new_segment


def test_k7_prompt_that_opens_thinking() -> None:
    renderer = renderer_of("deepseek_r1")
    conversation, contexts = play(renderer, [[user("Hi")], "Hm.\n</think>\n\nYo", [user("B")]])
    assert [context.new_segment for context in contexts] == [False, True]
    assert text_of(renderer, conversation.token_ids) == (
        "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜>\n\nYo<｜end▁of▁sentence｜><｜User｜>B<｜Assistant｜><think>\n"
    )
    assert conversation.opened_thinking
    conversation.complete(renderer.encode_answer("call"))
    conversation.observe([tool("sun")])
    assert not conversation.opened_thinking  # This template opens no thinking after a tool result.


def test_k7_opened_thinking_that_the_template_keeps_is_no_rewrite() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role + '\\n' + m.content }}<|im_end|>{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n<think>\\n' }}{% endif %}"
    )
    renderer = renderer_of("qwen25", template=template)
    assert renderer.report().prefix_preserving
    _, contexts = play(renderer, [[user("Hi")], "Hm.\n</think>\n\nYo", [user("B")]])
    assert not contexts[1].new_segment


def test_k8_nothing_before_an_answer_gets_into_the_continuation() -> None:
    renderer = renderer_of("qwen3")
    _, contexts = play(renderer, TOOL[:3], [WEATHER])
    assert "think" not in text_of(renderer, contexts[1].context_ids)
    lone = renderer.template.render([user("Hi"), assistant("Yo")], prompt=False)
    assert "<think>\n\n</think>\n\nYo" in lone  # The template does put it before a last answer.


def test_k10_merge_across_the_boundary_is_reported_and_never_done() -> None:
    renderer = ChatRenderer(tokenizer_of("plain", merges=(("Ċ", "Ċ"), (".", "ĊĊ"))))
    assert renderer.template.encode(".\n\n") == [257]
    assert not renderer.report().boundary_exact
    assert renderer_of("plain").report().boundary_exact
    conversation = renderer.conversation()
    conversation.observe([user("Hi")])
    conversation.complete([64, 13])
    context = conversation.observe([user("B")])
    assert conversation.token_ids[-len(context.context_ids) - 2 :][:3] == [64, 13, 256]


def test_k10_nothing_that_belongs_to_the_start_of_a_text_is_done_in_the_middle() -> None:
    template = "{% for m in messages %}{{ m.role + ':' + m.content + ';' }}{% endfor %}{{ 'assistant:' }}"
    renderer = renderer_of("phi3", template=template)
    _, contexts = play(renderer, [[user("A")], "B", [user("C")]])
    assert text_of(renderer, contexts[1].context_ids) == ";user:C;assistant:"
    assert renderer.tokenizer.convert_ids_to_tokens(list(contexts[1].context_ids[:2])) == [";", "u"]
    assert renderer.tokenizer.convert_ids_to_tokens(list(contexts[0].context_ids[:2])) == ["▁", "u"]


@pytest.mark.parametrize(
    ("family", "tools", "messages", "dropped"),
    [
        ("smollm2", [WEATHER], [], "tools"),
        ("gemma", [WEATHER], [], "tools"),
        ("phi3", [], [user("Hi"), tool("sun")], "messages of role 'tool'"),
        ("llama3_plain", [], [user("Hi"), CALL], "the tool_calls of assistant messages"),
        ("phi3", [], [user("Hi"), CALL], "the tool_calls of assistant messages"),
    ],
)
def test_k11_what_a_template_would_drop_is_refused(
    family: str, tools: list[Tool], messages: list[Message], dropped: str
) -> None:
    with pytest.raises(TemplateError) as raised:
        renderer_of(family).conversation(tools).observe(messages)
    assert str(raised.value) == (
        f'the chat template of {family} does not show {dropped}; set chat.tool_role = "user" to have tools, calls and '
        "results written as plain messages, or give another template in chat.template"
    )


def test_k11_template_with_tools_that_drops_their_results_is_refused_at_the_start() -> None:
    template = "{{ tools | tojson if tools }}{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}"
    with pytest.raises(TemplateError, match="does not show messages of role 'tool'"):
        renderer_of("qwen25", template=template).conversation([WEATHER])


@pytest.mark.parametrize("family", ["qwen25", "qwen3", "llama3", "mistral", "deepseek_r1"])
def test_k11_worked_example_of_a_call_is_shown(family: str) -> None:
    call = {**CALL, "tool_calls": [{**CALL["tool_calls"][0], "id": "abcdefghi"}]}
    renderer = renderer_of(family)
    conversation, _ = play(renderer, [[user("Rome?"), call, tool("sun", tool_call_id="abcdefghi")]])
    text = text_of(renderer, conversation.token_ids)
    assert text.index("weather") < text.index('"city": "Rome"') < text.index("sun")


def test_k11_tools_as_plain_messages() -> None:
    renderer = renderer_of("smollm2", tool_role="user")
    shots: list[Message] = [user("Rome?"), CALL, tool("sun", name="weather"), assistant("Sunny."), user("Oslo?")]
    conversation, _ = play(
        renderer, [shots, "call", [tool("rain", name="weather"), tool("?"), user("Go on")]], [WEATHER]
    )
    rules, *turns = text_of(renderer, conversation.token_ids).split("<|im_end|>\n<|im_start|>")
    assert rules.startswith("<|im_start|>system\nYou can call these functions.")
    assert '{"type": "function", "function": {"name": "weather"' in rules
    assert turns == [
        "user\nRome?",
        'assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        "user\nResult of weather:\nsun",
        "assistant\nSunny.",
        "user\nOslo?",
        "assistant\ncall",
        "user\nResult of weather:\nrain\n\nTool result:\n?\n\nGo on",
        "assistant\n",
    ]


def test_k11_tools_as_plain_messages_without_a_system_role() -> None:
    renderer = renderer_of("gemma", tool_role="user")
    conversation, _ = play(renderer, [[system("Be brief."), user("Oslo?")]], [WEATHER])
    text = text_of(renderer, conversation.token_ids)
    assert text.startswith("<bos><start_of_turn>user\nBe brief.\n\nYou can call these functions.")
    assert text.endswith("</tool_call>\n\nOslo?<end_of_turn>\n<start_of_turn>model\n")


@pytest.mark.parametrize("family", FAMILIES)
def test_k11_system_messages_in_a_row_are_all_shown(family: str) -> None:
    renderer = renderer_of(family)
    conversation, _ = play(renderer, [[system("Rule 1."), system("Rule 2."), user("Hi")]])
    assert "Rule 1.\n\nRule 2." in text_of(renderer, conversation.token_ids)


def test_k11_a_system_message_that_would_be_dropped_is_refused() -> None:
    with pytest.raises(TemplateError, match=r"mistral drops a system message \(roles: user, system\)"):
        renderer_of("mistral").conversation().observe([user("Hi"), system("A rule.")])
    conversation, _ = play(renderer_of("deepseek_r1"), [[system("A rule."), user("Hi")], "Yo"])
    ids = list(conversation.token_ids)
    with pytest.raises(TemplateError, match=r"drops a system message \(roles: system, user, assistant, system, user\)"):
        conversation.observe([system("Another."), user("B")])
    conversation.observe([user("B")])
    assert conversation.token_ids[: len(ids)] == ids


def test_k11_a_system_message_that_the_template_changes_is_no_dropped_one() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content.replace('/no_think', '') }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
    )
    renderer = renderer_of("qwen25", template=template)
    said = [system("Be brief. /no_think"), user("Hi")]
    assert "Be brief. <|im_end|>" in text_of(renderer, play(renderer, [said, "Yo", said])[0].token_ids)


def test_k13_rewritten_prompt_is_rendered_anew() -> None:
    renderer = renderer_of("mistral")
    conversation, contexts = play(renderer, TWO, [WEATHER])
    assert [context.new_segment for context in contexts] == [False, True]
    text = text_of(renderer, conversation.token_ids)
    assert text.startswith("<s>[INST] Hi[/INST] Yes.</s>[AVAILABLE_TOOLS] [{")
    assert text.endswith("}][/AVAILABLE_TOOLS][INST] And?[/INST]")
    assert conversation.token_ids == single_pass(renderer, TWO, [WEATHER])


def test_k13_history_that_the_template_refuses_goes_on_from_the_ids() -> None:
    # It counts roles over tool turns whose calls were text, so it refuses the whole but none of the steps.
    renderer = renderer_of("mistral")
    conversation, contexts = play(renderer, [*TOOL, [user("B")]], [WEATHER])
    assert [context.new_segment for context in contexts] == [False, False, False]
    assert text_of(renderer, conversation.token_ids).endswith("}][/AVAILABLE_TOOLS][INST] B[/INST]")


def test_k13_continuation_that_depends_on_the_history() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ loop.index ~ m.role ~ ':' ~ m.content }}<|im_end|>{% endfor %}"
        "<|im_start|>{{ messages | length + 1 }}assistant:"
    )
    renderer = renderer_of("qwen25", template=template)
    conversation, contexts = play(renderer, THREE)
    assert conversation.new_segments == 0
    assert (
        text_of(renderer, contexts[2].context_ids) == "<|im_start|>5user:Ünïcode 漢 🙂<|im_end|><|im_start|>6assistant:"
    )
    assert conversation.token_ids == single_pass(renderer, THREE)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_k14_only_sampled_ids_are_no_context(family: str) -> None:
    renderer = renderer_of(family)
    conversation, mask, answers = renderer.conversation(), list[int](), list[int]()
    for index in range(3):
        context = conversation.observe([user("Question")])
        mask = [*(() if context.new_segment else mask), *(0 for _ in context.context_ids)]
        answer = renderer.encode_answer(f"Answer {index}")
        conversation.complete(answer)
        mask += [1] * len(answer)
        answers = [*(() if context.new_segment else answers), *answer]
    assert [id for id, trained in zip(conversation.token_ids, mask, strict=True) if trained] == answers


@pytest.mark.parametrize("thinking", [False, True])
def test_k15_template_kwargs_reach_every_render(thinking: bool) -> None:
    renderer = renderer_of("qwen3", template_kwargs={"enable_thinking": thinking}, history="keep")
    _, contexts = play(renderer, TWO)
    for context in contexts:
        expected = "<|im_start|>assistant\n" + ("" if thinking else "<think>\n\n</think>\n\n")
        assert text_of(renderer, context.context_ids).endswith(expected)


def test_k15_empty_thinking_that_the_template_deletes_starts_a_new_segment() -> None:
    renderer = renderer_of("qwen3", template_kwargs={"enable_thinking": False})
    conversation, contexts = play(renderer, TWO)
    assert [context.new_segment for context in contexts] == [False, True]
    assert conversation.token_ids == single_pass(renderer, TWO)


def test_k15_custom_kwargs() -> None:
    renderer = renderer_of("llama3", template_kwargs={"date_string": "1 Jan 2030"})
    conversation, _ = play(renderer, THREE)
    assert conversation.token_ids == single_pass(renderer, THREE)
    assert "Today Date: 1 Jan 2030" in text_of(renderer, conversation.token_ids)


def test_k28_prompt_with_history_is_one_context() -> None:
    renderer = renderer_of("qwen25")
    _, contexts = play(renderer, SHOTS)
    assert text_of(renderer, contexts[0].context_ids).endswith(
        "user\n1+1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text_of(renderer, contexts[1].context_ids) == REST.replace("B", "Go on")


@pytest.mark.parametrize("answer", ["", " ", "\n\nYo \n", THOUGHT.replace("\n", "") + "call\n\n"])
def test_k31_white_space_changes_are_no_rewrite(answer: str) -> None:
    for family in ("llama3", "gemma", "mistral"):
        _, contexts = play(renderer_of(family), [[user("Hi")], answer, [user("B")]])
        assert not contexts[1].new_segment
    _, contexts = play(renderer_of("qwen3"), [[user("Hi")], answer, [tool("sun")]], [WEATHER])
    assert not contexts[1].new_segment


def test_k31_absent_and_empty_content_are_the_same() -> None:
    renderer = renderer_of("qwen25")
    with_none, _ = play(renderer, [[user("Rome?"), CALL, tool("sun")]], [WEATHER])
    with_empty, _ = play(renderer, [[user("Rome?"), {**CALL, "content": ""}, tool("sun")]], [WEATHER])
    assert with_none.token_ids == with_empty.token_ids
