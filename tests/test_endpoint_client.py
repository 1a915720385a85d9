"""The client of OpenAI-compatible endpoints: what is tried again, and who learns the key."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any

import pytest
from endpoint_kit import HELLO
from fake_openai import FakeOpenAI

from relax_gym.endpoint.client import (
    IDLE_SECONDS,
    Endpoint,
    EndpointConfig,
    EndpointError,
    PromptTooLong,
    base_url,
    retry_after,
)
from relax_gym.endpoint.replies import Reply, Usage
from relax_gym.errors import ConfigError
from relax_gym.types import FinishReason


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
