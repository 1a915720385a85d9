"""The stand-ins of the testing kit."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from relax_gym import (
    Batch,
    Completion,
    FinishReason,
    SamplingParams,
    user,
)
from relax_gym.chat import ChatRenderer
from relax_gym.errors import ModelError, SamplerError
from relax_gym.testing import (
    RecordingLearner,
    ScriptedRequest,
    ScriptedSampler,
    tiny_tokenizer,
)

PARAMS = SamplingParams(max_new_tokens=8)
A, B, EOS = 67, 68, 2


def play(
    sampler: ScriptedSampler, prompts: Sequence[Sequence[int]], params: SamplingParams = PARAMS
) -> list[Completion]:
    async def session() -> list[Completion]:
        opened = sampler.open_session()
        try:
            return [await opened.generate(prompt, params) for prompt in prompts]
        finally:
            opened.close()
            opened.close()

    return asyncio.run(session())


def test_scripted_replies_come_turn_by_turn() -> None:
    given = Completion(token_ids=(9,), logprobs=(-2.0,), versions=(7,), finish_reason=FinishReason.ABORT)
    sampler = ScriptedSampler(["ab", [5, 6], given, "abababababab"])
    assert sampler.version == -1
    first, second, third, fourth = play(sampler, [[1], [1, 2], [3], [4]])
    assert first.token_ids == (A, B, EOS)
    assert (first.logprobs, first.versions, first.finish_reason) == ((-0.5,) * 3, (-1,) * 3, FinishReason.STOP)
    assert (second.token_ids, second.finish_reason) == ((5, 6), FinishReason.STOP)
    assert third is given
    assert (fourth.token_ids, fourth.finish_reason) == ((A, B) * 4, FinishReason.LENGTH)
    assert sampler.requests[1] == ScriptedRequest(session=0, turn=1, prompt_ids=(1, 2), params=PARAMS)
    assert (sampler.opened, sampler.closed_sessions, sampler.open_sessions) == (1, 1, 0)
    assert (sampler.metrics(), sampler.metrics()) == ({"requests": 4.0}, {"requests": 0.0})


def test_a_script_may_be_a_function_and_may_fail() -> None:
    def script(prompt_ids: Sequence[int], params: SamplingParams, turn: int) -> Any:
        return RuntimeError("engine died") if turn == 1 else [len(prompt_ids), params.max_new_tokens]

    sampler = ScriptedSampler(script, keep_requests=False)
    assert play(sampler, [[1, 2, 3]])[0].token_ids == (3, 8)
    with pytest.raises(RuntimeError, match="engine died"):
        play(sampler, [[1], [1]])
    assert sampler.open_sessions == 0
    assert sampler.requests == []
    with pytest.raises(SamplerError, match="the script has 1 replies, but a session asked for turn 1"):
        play(ScriptedSampler(["a"]), [[1], [1]])


def test_new_tokens_carry_the_published_version_and_the_context_is_bounded() -> None:
    async def run() -> tuple[Completion, ScriptedSampler]:
        sampler = ScriptedSampler(["aaaa"], max_context=5)
        await sampler.start()
        await sampler.update_weights(iter([]), 3)
        session = sampler.open_session()
        completion = await session.generate([1, 1, 1], PARAMS)
        with pytest.raises(SamplerError, match="the prompt has 5 tokens; max_context is 5"):
            await session.generate([1] * 5, PARAMS)
        session.close()
        with pytest.raises(SamplerError, match="session 0 is closed"):
            await session.generate([1], PARAMS)
        await sampler.aclose()
        await sampler.aclose()
        with pytest.raises(SamplerError, match="the sampler is closed"):
            sampler.open_session()
        return completion, sampler

    completion, sampler = asyncio.run(run())
    assert (completion.token_ids, completion.versions) == ((A, A), (3, 3))
    assert completion.finish_reason is FinishReason.LENGTH
    assert (sampler.started, sampler.published, sampler.version, sampler.closed) == (1, [3], 3, True)


def test_delay_is_counted_in_turns_of_the_loop_and_can_be_cancelled() -> None:
    async def run() -> list[int]:
        sampler = ScriptedSampler(["a", "a"], delay=3)
        task = asyncio.create_task(sampler.open_session().generate([1], PARAMS))
        turns = 0
        while not task.done():
            turns += 1
            await asyncio.sleep(0)
        task = asyncio.create_task(sampler.open_session().generate([1], PARAMS))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return [turns, sampler.cancelled, len(sampler.requests)]

    assert asyncio.run(run()) == [4, 1, 2]


def test_tiny_tokenizer_round_trips_any_text_and_renders_chat() -> None:
    tokenizer = tiny_tokenizer(extra_special=("<|image_pad|>",))
    text = "héllo 漢\n\x00<|im_start|><|image_pad|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids[-2:] == [1, 3]
    assert tokenizer.decode(ids) == text
    assert (len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id) == (260, 0, 2)
    conversation = ChatRenderer(tiny_tokenizer()).conversation()
    rendered = conversation.observe(user("hi"))
    assert tiny_tokenizer().decode(rendered.context_ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    own = tiny_tokenizer(chat_template="{{ messages[0]['content'] }}")
    assert own.apply_chat_template(user("hi"), tokenize=False) == "hi"


def test_recording_learner_keeps_batches_and_its_version(tmp_path: Path) -> None:
    learner = RecordingLearner(metrics={"loss": 2.0})
    batch = Batch(version=0, samples=())
    assert learner.step(batch) == {"loss": 2.0}
    assert learner.imitate(batch, lr=1e-3) == {"loss": 2.0}
    assert (learner.version, learner.batches, learner.imitated) == (1, [batch], [batch])
    assert list(learner.weights()) == []
    learner.export(tmp_path / "a")
    learner.save_state(tmp_path / "a")
    other = RecordingLearner()
    other.load(tmp_path / "a")
    assert other.version == 1
    learner.step(batch)
    learner.save_state(tmp_path / "a")
    with pytest.raises(ModelError, match="weights of version 1 and state of version 2"):
        other.load(tmp_path / "a")
    with pytest.raises(ModelError, match=r"recording_learner\.json is missing"):
        other.load(tmp_path / "b")
    learner.close()
    assert learner.closed == 1


def test_the_kit_imports_neither_torch_nor_transformers() -> None:
    script = "import relax_gym.testing, sys; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
