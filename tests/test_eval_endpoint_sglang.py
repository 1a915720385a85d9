"""`relax-gym eval ENV --endpoint` against a real SGLang server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from command import run

from relax_gym.endpoint.client import Endpoint, EndpointConfig, EndpointError, PromptTooLong
from relax_gym.endpoint.conversation import Conversation
from relax_gym.endpoint.replies import Call, Reply, Usage
from relax_gym.lines import read_lines
from relax_gym.registry import make
from relax_gym.types import FinishReason, Message
from relax_gym_plugins.samplers.sglang.process import ServerProcess

pytest_plugins = ["sglang_fixtures"]
pytestmark = pytest.mark.sglang


@pytest.fixture
def key(sglang_server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SERVER_KEY", sglang_server.headers["Authorization"].removeprefix("Bearer "))
    return "SERVER_KEY"


def ask(server: ServerProcess, key: str | None, messages: list[Message], **options: object) -> Reply:
    async def main() -> Reply:
        config = EndpointConfig(url=f"{server.url}/v1", model="m", key_env=key, body={"max_tokens": 3}, retries=0)
        endpoint = Endpoint(config)
        try:
            return await endpoint.complete(messages, **options)  # type: ignore[arg-type]
        finally:
            await endpoint.aclose()

    return asyncio.run(main())


def test_an_evaluation(capsys, sglang_server: ServerProcess, key: str, tmp_path: Path) -> None:
    where = ["--endpoint", f"{sglang_server.url}/v1", "--model", "m", "--key-env", key, "--out", tmp_path]
    options = ["--episodes", 3, "--attempts", 2, "--max-tokens", 3, "--temperature", 1.0, "--set", "style=terse"]
    code, out, err = run(capsys, "eval", "relax_gym/GuessNumber-v0", *where, *options)
    assert code == 0, err
    assert "pass@2" in out
    kept = read_lines(tmp_path / "episodes.jsonl")
    assert [(record["fault"], len(record["turns"]) > 0) for record in kept] == [(None, True)] * 6
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert 0 < results["completion_tokens"] <= 3 * sum(len(record["turns"]) for record in kept)


def test_results_of_tools_are_taken(sglang_server: ServerProcess, key: str) -> None:
    env = make("relax_gym/Calculator-v0")
    conversation = Conversation()
    conversation.observe(env.reset(seed=0)[0])
    made = Call(id="call_1", name="calculate", arguments='{"expression": "1 + 1"}')
    said = Reply(content="", reasoning="", calls=(made,), finish_reason=FinishReason.STOP, usage=Usage())
    conversation.answer(said)
    conversation.observe(env.step(said.action).observation)
    assert conversation.messages[-1]["content"] == "2"
    assert ask(sglang_server, key, conversation.messages, tools=env.tools).usage.completion == 3


def test_refusals(sglang_server: ServerProcess, key: str) -> None:
    with pytest.raises(EndpointError, match=r"answered 401: .*no key was sent"):
        ask(sglang_server, None, [{"role": "user", "content": "hello"}])
    with pytest.raises(PromptTooLong):
        ask(sglang_server, key, [{"role": "user", "content": "hello " * 2000}])
