"""What counts of a reply of an endpoint."""

from __future__ import annotations

from typing import Any

import pytest
from endpoint_kit import call, reply_of

from relax_gym.endpoint.replies import ReplyError, read_reply
from relax_gym.tool_calls import MalformedCall, ToolCall, parse_tool_calls
from relax_gym.types import FinishReason


@pytest.mark.parametrize(
    ("message", "action", "text"),
    [
        ({"content": "4"}, "4", "4"),
        ({"content": None}, "", ""),
        ({"content": [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]}, "42", "42"),
        ({"content": "4", "reasoning_content": "so"}, "4", "<think>so</think>\n4"),
        ({"content": "4", "reasoning": "so"}, "4", "<think>so</think>\n4"),
        ({"content": "<think>so</think>\n4"}, "4", "<think>so</think>\n4"),
        ({"content": "so</think>4"}, "4", "<think>so</think>\n4"),
        ({"content": "<think>without an end"}, "", "<think>without an end</think>\n"),
    ],
)
def test_thinking_stays_out_of_the_action(message: dict[str, Any], action: str, text: str) -> None:
    reply = reply_of(message)
    assert (reply.action, reply.text) == (action, text)


def test_finish_reasons() -> None:
    assert reply_of({"content": "4"}, "length").finish_reason is FinishReason.LENGTH
    assert reply_of({"content": "4"}, "tool_calls").finish_reason is FinishReason.STOP
    with pytest.raises(ReplyError, match="gave the answer up"):
        reply_of({"content": "4"}, "abort")


@pytest.mark.parametrize(
    "reply",
    [
        [], {}, {"choices": {}}, {"choices": [1]}, {"choices": [{}]}, {"choices": [{"message": {"content": 4}}]},
        {"choices": [{"message": {"content": "", "tool_calls": 3}}]},
        {"choices": [{"message": {"content": "", "tool_calls": [{"function": {"arguments": "{}"}}]}}]},
    ],
)  # fmt: skip
def test_replies_that_are_none(reply: Any) -> None:
    with pytest.raises(ReplyError):
        read_reply(reply)


def test_tool_calls_become_text_that_envs_read() -> None:
    reply = reply_of({"content": "I add.", "tool_calls": [call("add", '{"a": "ü"}'), call("add", "{broken", None)]})
    parsed = parse_tool_calls(reply.action)
    assert parsed.text == "I add."
    good, bad = parsed.calls
    assert good == ToolCall(name="add", arguments={"a": "ü"}, id="call_1")
    assert isinstance(bad, MalformedCall)
    assert (bad.name, bad.id) == ("add", "call00002")
