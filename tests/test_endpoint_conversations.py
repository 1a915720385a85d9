"""How conversations look to an endpoint."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy as np
import pytest
from endpoint_kit import HELLO, call, reply_of
from fake_openai import check
from PIL import Image as Pillow

from relax_gym.endpoint.conversation import Conversation
from relax_gym.endpoint.replies import Reply
from relax_gym.media.items import Audio, Image
from relax_gym.types import Message


def messages_after(reply: Reply, observation: list[Message]) -> list[Message]:
    """What a strict server gets after one turn; the first message is left out."""
    conversation = Conversation()
    conversation.observe(HELLO)
    conversation.answer(reply)
    conversation.observe(observation)
    assert check(conversation.messages) is None
    return conversation.messages[1:]


def result(content: Any, id: str = "call00001") -> Message:
    return {"role": "tool", "name": "add", "tool_call_id": id, "content": content}


def test_results_answer_calls_by_their_ids() -> None:
    reply = reply_of({"content": "", "tool_calls": [call("add", "{}", "odd id!"), call("add", "{}", "b")]})
    said, first, second, hint = messages_after(
        reply, [result("1"), {"role": "user", "content": "go on"}, result("2", "b")]
    )
    assert [made["id"] for made in said["tool_calls"]] == ["odd id!", "b"]
    assert (first["tool_call_id"], first["content"]) == ("odd id!", "1")
    assert (second["tool_call_id"], second["content"]) == ("b", "2")
    assert hint == {"role": "user", "content": "go on"}


def test_calls_with_one_id_get_their_own() -> None:
    reply = reply_of({"content": "", "tool_calls": [call("add", "{}", "a"), call("add", "{}", "a")]})
    said, first, second = messages_after(reply, [result("1"), result("2")])
    assert [made["id"] for made in said["tool_calls"]] == [first["tool_call_id"], second["tool_call_id"]]


def test_calls_that_the_model_wrote_as_text_are_linked() -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    said, answer = messages_after(reply_of({"content": f"I add. {text}"}), [result("1")])
    assert said["content"] == "I add."
    assert said["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert answer["tool_call_id"] == said["tool_calls"][0]["id"]


def test_a_call_that_cannot_be_read_goes_back_as_json() -> None:
    said, _ = messages_after(reply_of({"content": "<tool_call>{add</tool_call>"}), [result("what?")])
    assert json.loads(said["tool_calls"][0]["function"]["arguments"]) == {"unreadable": "{add"}


@pytest.mark.parametrize(
    "observation",
    [[{"role": "user", "content": "no"}], [result("1"), result("2")], [result([{"type": "text", "text": "1"}])] * 2],
)
def test_calls_without_their_results_become_text(observation: list[Message]) -> None:
    said, *others = messages_after(reply_of({"content": "", "tool_calls": [call("add", "{}")]}), observation)
    assert "tool_calls" not in said
    assert said["content"].startswith("<tool_call>")
    assert all(message["role"] == "user" for message in others)


def test_an_env_may_show_calls_of_its_own() -> None:
    shown = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    conversation = Conversation()
    conversation.observe([*HELLO, shown, result("1")])
    assert check(conversation.messages) is None
    assert conversation.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


def part(kind: str, item: object) -> dict[str, Any]:
    return {"type": kind, kind: item}


PIXELS = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)


def test_images_are_data_uris() -> None:
    conversation = Conversation()
    conversation.observe([{"role": "user", "content": [part("image", Image(pixels=PIXELS)), part("text", "what?")]}])
    image, text = conversation.messages[0]["content"]
    assert text == {"type": "text", "text": "what?"}
    head, _, data = image["image_url"]["url"].partition(",")
    assert (image["type"], head) == ("image_url", "data:image/png;base64")
    assert np.array_equal(np.asarray(Pillow.open(io.BytesIO(base64.b64decode(data)))), PIXELS)


def test_sounds_are_wav() -> None:
    conversation = Conversation()
    sound = Audio(samples=np.zeros(80, dtype=np.float32), rate=8000)
    conversation.observe([{"role": "user", "content": [part("audio", sound)]}])
    given = conversation.messages[0]["content"][0]["input_audio"]
    assert given["format"] == "wav"
    assert base64.b64decode(given["data"]).startswith(b"RIFF")


def test_media_of_a_result_follow_it_in_a_message_of_the_user() -> None:
    reply = reply_of({"content": "", "tool_calls": [call("add", "{}")]})
    seen = result([part("text", "a picture"), part("image", Image(pixels=PIXELS))])
    _, answer, shown = messages_after(reply, [seen])
    assert answer["content"] == "a picture"
    assert (shown["role"], [one["type"] for one in shown["content"]]) == ("user", ["image_url"])


def test_two_results_with_media_keep_all_results_together() -> None:
    reply = reply_of({"content": "", "tool_calls": [call("add", "{}", "a"), call("add", "{}", "b")]})
    seen = result([part("image", Image(pixels=PIXELS))])
    said = messages_after(reply, [seen, seen])
    assert [message["role"] for message in said] == ["assistant", "tool", "tool", "user", "user"]
