"""The experts that a real SGLang server chose reach the learner, which then computes the same log-probs."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sglang_kit import attached, changed
from transformers import PreTrainedModel

from relax_gym.models import load_tokenizer
from relax_gym.sampler import SamplingParams
from relax_gym.trajectory import to_samples
from relax_gym.types import Completion, StopReason, Task, TrainingSample, Trajectory, Turn
from relax_gym_plugins.samplers.sglang.process import ServerProcess
from relax_gym_plugins.samplers.sglang.sampler import SGLangSampler
from relax_gym_trainers.torch_learner.packing import pack
from relax_gym_trainers.torch_learner.policy import Policy

pytest_plugins = ["sglang_fixtures"]
pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("one_thread")]

PROMPT = [5, 20, 33, 47]


def sampling(
    server: ServerProcess, model: Path, folder: Path, use: Callable[[SGLangSampler], Awaitable[TrainingSample]]
) -> TrainingSample:
    """Use a sampler whose servers have the model's own weights, as version 0."""

    async def run() -> TrainingSample:
        sampler = attached(server, model, folder, sync="ipc", routed_experts=True)
        try:
            await sampler.start()
            await sampler.update_weights(changed(model, 0).named_parameters(), 0)
            return await use(sampler)
        finally:
            await sampler.aclose()

    return asyncio.run(asyncio.wait_for(run(), 120))


def sample(*turns: tuple[list[int], Completion]) -> TrainingSample:
    """What the learner gets of an episode: context and completion of each turn."""
    played = tuple(Turn(observation=(), context_ids=tuple(c), completion=s, text="", action="") for c, s in turns)
    task = Task(env_id="test/None-v0", seed=0)
    trajectory = Trajectory(task=task, episode_id="e", turns=played, stop_reason=StopReason.ENV_DONE)
    (made,) = to_samples(trajectory, "g")
    return made


@torch.no_grad()
def learner_logprobs(model: PreTrainedModel, one: TrainingSample, never: Sequence[int] = ()) -> NDArray[np.float32]:
    """The learner's, of the sampled tokens; `never` are ids that are never sampled."""
    policy = Policy(
        model, temperature=1.0, dtype=torch.float32, chunk=256, share_prefix=False, never_sampled=tuple(never)
    )
    (batch,) = pack([one], budget=4096, share_prefix=False)
    found: NDArray[np.float32] = policy.score(batch)[0].numpy()
    return found


@torch.no_grad()
def own_experts(model: PreTrainedModel, one: TrainingSample) -> NDArray[np.int64]:
    """What the model itself chooses, [tokens - 1, layers, top_k], sorted."""
    chosen: list[torch.Tensor] = []
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    hooks = [router.register_forward_hook(lambda _m, _i, out: chosen.append(out[2])) for router in routers]
    model(torch.from_numpy(one.token_ids[None, :-1]).long(), use_cache=False)
    for hook in hooks:
        hook.remove()
    return np.sort(torch.stack(chosen, 1).numpy())


def test_k41_over_two_turns(moe_server: ServerProcess, tiny_moe: Path, tmp_path: Path) -> None:
    end = load_tokenizer(tiny_moe).eos_token_id
    endless = {end: -math.inf}

    async def use(sampler: SGLangSampler) -> TrainingSample:
        session, answer = sampler.open_session(), [9, 10, 11]
        first = await session.generate(PROMPT, SamplingParams(max_new_tokens=12, logit_bias=endless))
        context = [*PROMPT, *first.token_ids, *answer]
        second = await session.generate(context, SamplingParams(max_new_tokens=8, logit_bias=endless))
        session.close()
        assert sampler.metrics()["cached_tokens"] >= len(PROMPT)  # whose experts the server still knows
        return sample((PROMPT, first), (answer, second))

    one = sampling(moe_server, tiny_moe, tmp_path, use)
    assert one.routed_experts is not None and one.routed_experts.shape == (4 + 12 + 3 + 8 - 1, 2, 2)
    np.testing.assert_array_equal(np.sort(one.routed_experts), own_experts(changed(tiny_moe, 0), one))
    sampled = one.logprobs[one.loss_mask == 1]
    np.testing.assert_allclose(learner_logprobs(changed(tiny_moe, 0), one, [end]), sampled, atol=1e-4)
    others = dataclasses.replace(one, routed_experts=3 - one.routed_experts)
    assert abs(learner_logprobs(changed(tiny_moe, 0), others, [end]) - sampled).max() > 0.01  # the learner does replay


def test_k41_over_a_weight_update(moe_server: ServerProcess, tiny_moe: Path, tmp_path: Path) -> None:
    """Each token keeps the choice it was sampled with, and has the log-prob of the weights that sampled it."""
    end = load_tokenizer(tiny_moe).eos_token_id
    params = SamplingParams(max_new_tokens=600, logit_bias={end: -math.inf})

    async def use(sampler: SGLangSampler) -> TrainingSample:
        long, short = sampler.open_session(), sampler.open_session()
        task = asyncio.ensure_future(long.generate(PROMPT, params))
        await short.generate(PROMPT, SamplingParams(max_new_tokens=8))  # as long as this, the other one has run
        await sampler.update_weights(changed(tiny_moe, 1).named_parameters(), 1)
        return sample((PROMPT, await task))

    one = sampling(moe_server, tiny_moe, tmp_path, use)
    assert one.routed_experts is not None and one.routed_experts.shape == (4 + 600 - 1, 2, 2)
    versions = one.versions[one.loss_mask == 1]
    seam = int((versions == 0).sum())
    assert 0 < seam < 600 and list(versions) == [0] * seam + [1] * (600 - seam)
    rows, before = np.sort(one.routed_experts), len(PROMPT) + seam - 1  # the last token of version 0 was read by 1
    old, new = own_experts(changed(tiny_moe, 0), one), own_experts(changed(tiny_moe, 1), one)
    np.testing.assert_array_equal(rows[:before], old[:before])
    np.testing.assert_array_equal(rows[before:], new[before:])
    assert (old[:before] != new[:before]).any()
    sampled = one.logprobs[one.loss_mask == 1]
    np.testing.assert_allclose(learner_logprobs(changed(tiny_moe, 0), one, [end])[:seam], sampled[:seam], atol=1e-4)
    recomputed = dataclasses.replace(one, routed_experts=new.astype(np.int32))  # of all keys and values it read
    found = learner_logprobs(changed(tiny_moe, 1), recomputed, [end])
    np.testing.assert_allclose(found[seam:], sampled[seam:], atol=1e-4)
