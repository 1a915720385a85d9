"""The client of OpenAI-compatible endpoints, and how conversations look to one."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from fake_openai import FakeOpenAI, check
from PIL import Image as Pillow

from relax_gym.endpoint.client import (
    IDLE_SECONDS,
    Endpoint,
    EndpointConfig,
    EndpointError,
    PromptTooLong,
    base_url,
    retry_after,
)
from relax_gym.endpoint.conversation import Conversation
from relax_gym.endpoint.replies import Reply, ReplyError, Usage, read_reply
from relax_gym.errors import ConfigError
from relax_gym.media.items import Audio, Image
from relax_gym.tool_calls import MalformedCall, ToolCall, parse_tool_calls
from relax_gym.types import FinishReason, Message

HELLO = [{"role": "user", "content": "hello"}]


def ask(
    faults: Sequence[Any] = (), *, key: str | None = None, waits: list[float] | None = None, **options: Any
) -> tuple[Reply, FakeOpenAI]:
    """Ask once a server that answers "hi" after these faults; `waits` gets the seconds between tries."""
    slept = waits if waits is not None else []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def main() -> tuple[Reply, FakeOpenAI]:
        fake = FakeOpenAI(lambda body: {"content": "hi"}, key=key)
        fake.faults = list(faults)
        async with fake.serving():
            endpoint = Endpoint(EndpointConfig(url=fake.url, model="m", **options), sleep=sleep)
            try:
                return await endpoint.complete(HELLO, seed=7), fake
            finally:
                await endpoint.aclose()

    return asyncio.run(main())


# Retries -------------------------------------------------------------------------------------------------------------


def test_request_says_what_was_given() -> None:
    reply, fake = ask(body={"temperature": 0.5})
    assert reply == Reply(
        content="hi", reasoning="", calls=(), finish_reason=FinishReason.STOP, usage=Usage(prompt=10, completion=3)
    )
    assert fake.bodies == [{"model": "m", "messages": HELLO, "temperature": 0.5, "seed": 7}]


@pytest.mark.parametrize("fault", [408, 409, 429, 500, 502, 503, "drop", "no { json", {"choices": []}, {"error": "x"}])
def test_passing_faults_are_tried_again(fault: Any) -> None:
    waits: list[float] = []
    reply, fake = ask([fault, fault], waits=waits)
    assert reply.content == "hi"
    assert len(fake.bodies) == 3
    assert 0.25 <= waits[0] <= 0.5 <= waits[1] <= 1.0


def test_retry_after_is_honoured() -> None:
    waits: list[float] = []
    ask([(429, 7), (503, 0)], waits=waits)
    assert waits[0] == 7
    assert waits[1] <= 1


def test_retry_after_beyond_the_deadline_fails_at_once() -> None:
    with pytest.raises(
        EndpointError,
        match=r"answered 429: slow down \(tried 1 times, at most 9 within 10 s; the server asks to wait 60 s",
    ):
        ask([(429, 60)], deadline=10.0)


def test_a_hanging_server_is_left_at_the_timeout() -> None:
    reply, fake = ask(["hang"], timeout=0.2)
    assert reply.content == "hi"
    assert len(fake.bodies) >= 2


def test_the_deadline_holds_for_all_tries_together() -> None:
    with pytest.raises(
        EndpointError, match=r"did not answer within 0\.\d+ s \(tried \d times, at most 9 within 0\.3 s"
    ):
        ask(["hang"] * 9, timeout=0.2, deadline=0.3)


def test_a_wait_that_takes_longer_than_it_should_does_not_lift_the_deadline() -> None:
    async def oversleep(seconds: float) -> None:
        await asyncio.sleep(0.3)

    async def main() -> None:
        fake = FakeOpenAI(lambda body: {"content": "hi"})
        fake.faults = [500, "hang"]
        async with fake.serving():
            endpoint = Endpoint(EndpointConfig(url=fake.url, model="m", deadline=0.2, backoff=0.01), sleep=oversleep)
            with pytest.raises(EndpointError, match=r"answered 500: .*\(tried 1 times, at most 9 within 0\.2 s"):
                await endpoint.complete(HELLO)
            await endpoint.aclose()

    asyncio.run(asyncio.wait_for(main(), 5))


def test_retries_end() -> None:
    with pytest.raises(EndpointError, match=r"/v1/chat/completions answered 500: scripted 500 \(tried 3 times"):
        ask([500] * 3, retries=2)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_a_refusal_is_an_error_at_once(status: int) -> None:
    waits: list[float] = []
    with pytest.raises(EndpointError, match=f"/v1/chat/completions answered {status}: scripted {status}") as caught:
        ask([status], waits=waits)
    assert waits == []
    assert caught.value.for_all == (status in (401, 404))


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 4096 tokens. However, your messages resulted in 5000 tokens.",
        "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
        "Input length (5000 tokens) exceeds the maximum allowed length (4090 tokens).",
        "prompt is too long: 201 tokens > 200 maximum",
    ],
)
def test_a_prompt_that_is_too_long_has_an_error_of_its_own(message: str) -> None:
    async def main() -> None:
        fake = FakeOpenAI(lambda body: {"content": "hi"})
        fake.refuse = lambda body: message
        async with fake.serving():
            endpoint = Endpoint(EndpointConfig(url=fake.url, model="m"))
            try:
                await endpoint.complete(HELLO)
            finally:
                await endpoint.aclose()

    with pytest.raises(PromptTooLong):
        asyncio.run(main())


def test_nobody_there_is_an_error_that_names_the_address() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"

        async def main() -> None:
            endpoint = Endpoint(EndpointConfig(url=url, model="m", retries=1, backoff=0.0))
            try:
                await endpoint.complete(HELLO)
            finally:
                await endpoint.aclose()

        with pytest.raises(EndpointError, match=f"{url}/chat/completions: ClientConnectorError"):
            asyncio.run(main())


def test_retry_after_reads_seconds_and_dates() -> None:
    assert retry_after(None) is None
    assert retry_after("3") == 3
    assert retry_after("-3") == 0
    assert retry_after("soon") is None
    far = retry_after("Fri, 01 Jan 2100 00:00:00 GMT")
    assert far is not None
    assert far > 1e9
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0


def test_k96_connections_notice_a_peer_that_vanished() -> None:
    async def main() -> tuple[int, float]:
        async with Endpoint(EndpointConfig(url="http://x/v1", model="m"))._connect() as http:
            connector: Any = http.connector
            made = connector._socket_factory((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1)))
            with made:
                return made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), connector._keepalive_timeout

    assert asyncio.run(main()) == (1, IDLE_SECONDS)
    assert IDLE_SECONDS < 5  # of uvicorn, the shortest of the usual servers


# Keys ----------------------------------------------------------------------------------------------------------------


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret")
    _, fake = ask(key="sk-secret", key_env="MY_KEY")
    assert fake.headers[0]["Authorization"] == "Bearer sk-secret"


def test_without_key_env_none_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    _, fake = ask()
    assert "Authorization" not in fake.headers[0]


def test_a_wrong_key_is_not_shown_even_if_the_server_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-wrong")
    with pytest.raises(EndpointError, match="Incorrect API key provided") as caught:
        ask(key="sk-right", key_env="MY_KEY")
    assert "sk-wrong" not in str(caught.value)
    assert "the key in MY_KEY was sent" in str(caught.value)


def test_redirects_are_not_followed() -> None:
    with pytest.raises(
        EndpointError, match=r"answered 307: .* \(moved to http://127.0.0.1:9/v1; give that address with"
    ):
        ask([(307, "http://127.0.0.1:9/v1")])


def test_a_key_that_is_not_set_is_refused() -> None:
    with pytest.raises(ConfigError, match="--key-env NO_SUCH_KEY: the environment variable is not set"):
        Endpoint(EndpointConfig(url="http://x/v1", model="m", key_env="NO_SUCH_KEY"))


def test_urls() -> None:
    assert base_url("http://x:1/v1/") == "http://x:1/v1"
    assert base_url("https://x/v1/chat/completions") == "https://x/v1"
    for wrong in ("localhost:30000", "ftp://x", "http://"):
        with pytest.raises(ConfigError, match="is no URL"):
            base_url(wrong)
    for secret in ("http://me:pass@x/v1", "http://x/v1?key=pass"):
        with pytest.raises(ConfigError, match="put the key into an environment variable") as caught:
            base_url(secret)
        assert "pass@" not in str(caught.value)
        assert "=pass" not in str(caught.value)


# Replies -------------------------------------------------------------------------------------------------------------


def reply_of(message: dict[str, Any], finish: str = "stop") -> Reply:
    return read_reply({"choices": [{"message": message, "finish_reason": finish}]})


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


def call(name: str, arguments: str, id: str | None = "call_1") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_tool_calls_become_text_that_envs_read() -> None:
    reply = reply_of({"content": "I add.", "tool_calls": [call("add", '{"a": "ü"}'), call("add", "{broken", None)]})
    parsed = parse_tool_calls(reply.action)
    assert parsed.text == "I add."
    good, bad = parsed.calls
    assert good == ToolCall(name="add", arguments={"a": "ü"}, id="call_1")
    assert isinstance(bad, MalformedCall)
    assert (bad.name, bad.id) == ("add", "call00002")


# Conversations -------------------------------------------------------------------------------------------------------


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
