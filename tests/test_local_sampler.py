"""The local sampler against a plain full forward of the same model, in float32 on tiny models built in code."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_sampler_kit import (
    KINDS,
    await_tokens,
    build,
    build_tokenizer,
    check_exact,
    complete,
    play,
    prompt,
    scores,
    serving,
)

from relax_gym.config import RunConfig
from relax_gym.context import RunContext
from relax_gym.errors import SamplerError
from relax_gym.sampler import SamplingParams
from relax_gym.types import Completion, FinishReason
from relax_gym_plugins.samplers.local.options import LocalSamplerOptions
from relax_gym_plugins.samplers.local.sampler import LocalSampler


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_mixed_lengths_that_join_midway_equal_a_full_forward(kind: str, temperature: float) -> None:
    model = build(kind)
    lengths, news = [3, 40, 17, 1, 25, 9], [12, 5, 20, 9, 3, 30]

    async def run() -> list[Completion]:
        async with serving(model, max_slots=3, prefill_tokens=32, deterministic=False) as sampler:
            jobs = [
                complete(sampler, prompt(i, lengths[i]), max_new_tokens=news[i], temperature=temperature, seed=i)
                for i in range(6)
            ]
            return list(await asyncio.gather(*jobs))

    for i, out in enumerate(play(run())):
        assert (len(out.token_ids), out.finish_reason) == (news[i], FinishReason.LENGTH)
        check_exact(model, prompt(i, lengths[i]), out, temperature=temperature, seed=i)


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_turn_prefills_only_its_new_tokens(kind: str) -> None:
    model = build(kind)

    async def run() -> None:
        async with serving(model) as sampler:
            session = sampler.open_session()
            ids = prompt(0, 20)
            out = await session.generate(ids, SamplingParams(max_new_tokens=6, seed=5))
            first = sampler.metrics()
            assert (first["prefill_tokens"], first["cached_tokens"], first["generated_tokens"]) == (20, 0, 6)
            check_exact(model, ids, out, seed=5)
            ids = [*ids, *out.token_ids, *prompt(1, 7)]
            out = await session.generate(ids, SamplingParams(max_new_tokens=6, seed=6))
            second = sampler.metrics()
            # The last sampled token of a turn has not been through the model yet, so it counts as new.
            assert (second["prefill_tokens"], second["cached_tokens"]) == (8, 25)
            check_exact(model, ids, out, seed=6)
            ids = [*ids[:10], *prompt(2, 4)]
            out = await session.generate(ids, SamplingParams(max_new_tokens=6, seed=7))
            third = sampler.metrics()
            assert (third["prefill_tokens"], third["cached_tokens"]) == (4, 10)
            check_exact(model, ids, out, seed=7)
            session.close()

    play(run())


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_a_prompt_that_group_mates_share_is_prefilled_once(kind: str) -> None:
    model = build(kind)
    shared = prompt(0, 30)

    async def run() -> None:
        async with serving(model, deterministic=False) as sampler:
            sessions = [sampler.open_session() for _ in range(6)]
            prompts = [shared if i < 4 else [*shared[:24], *prompt(i, 3)] for i in range(6)]
            outs = await asyncio.gather(
                *(
                    s.generate(ids, SamplingParams(max_new_tokens=5, seed=i))
                    for i, (s, ids) in enumerate(zip(sessions, prompts, strict=True))
                )
            )
            counted = sampler.metrics()
            assert (counted["prefill_tokens"], counted["cached_tokens"]) == (30 + 3 * 1 + 2 * 3, 3 * 29 + 2 * 24)
            for i, out in enumerate(outs):
                check_exact(model, prompts[i], out, seed=i)
            assert len({out.token_ids for out in outs[:4]}) > 1
            for session in sessions[1:]:
                session.close()
            first = sessions[0].generate([1], SamplingParams(max_new_tokens=20))
            _, late = await asyncio.gather(first, complete(sampler, shared, seed=9))
            check_exact(model, shared, late, seed=9)

    play(run())


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma2"])
def test_k39_after_a_weight_update_tokens_come_from_the_new_weights_only(kind: str) -> None:
    old, new = build(kind, seed=0), build(kind, seed=1)
    ids = prompt(0, 20)

    async def run() -> tuple[Completion, Completion, Completion]:
        async with serving(old) as sampler:
            assert sampler.version == -1
            session = sampler.open_session()
            before = await session.generate(ids, SamplingParams(max_new_tokens=4, seed=3))
            task = asyncio.create_task(session.generate(ids, SamplingParams(max_new_tokens=200, seed=3)))
            await asyncio.to_thread(await_tokens, sampler, 20)
            await sampler.update_weights(new.named_parameters(), 7)
            assert sampler.version == 7
            during = await task
            after = await session.generate(ids, SamplingParams(max_new_tokens=8, seed=3))
            session.close()
            return before, during, after

    before, during, after = play(run())
    check_exact(old, ids, before, seed=3)
    check_exact(new, ids, after, seed=3)
    assert set(before.versions) == {-1} and set(after.versions) == {7}
    split = during.versions.index(7)
    assert split >= 16 and during.versions == (-1,) * split + (7,) * (200 - split)
    table = scores(new, [*ids, *during.token_ids])
    for index in range(split, 200):
        assert abs(during.logprobs[index] - table[len(ids) + index - 1][during.token_ids[index]]) <= 1e-4


def test_an_update_that_does_not_fit_changes_nothing() -> None:
    old, new = build("llama"), build("llama", seed=1)
    ids = prompt(0, 9)
    tensors = dict(new.named_parameters())
    incomplete = {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}
    cases = [
        (incomplete, "missing model.norm.weight"),
        ({**tensors, "model.nrom.weight": tensors["model.norm.weight"]}, "unknown model.nrom.weight"),
        (
            {**tensors, "model.norm.weight": torch.ones(3)},
            r"'model.norm.weight' has shape \(3,\); the model's is \(32,\)",
        ),
    ]

    async def run() -> None:
        async with serving(old) as sampler:
            for weights, message in cases:
                with pytest.raises(SamplerError, match=message):
                    await sampler.update_weights(weights.items(), 3)
                assert sampler.version == -1
            check_exact(old, ids, await complete(sampler, ids, seed=1), seed=1)

    play(run())


def test_k29_k30_each_turn_is_one_bundle_of_its_own_tokens() -> None:
    async def run() -> list[Completion]:
        async with serving(build()) as sampler:
            session = sampler.open_session()
            ids, outs = prompt(0, 5), []
            for new in (4, 2, 6):
                outs.append(await session.generate(ids, SamplingParams(max_new_tokens=new)))
                ids = [*ids, *outs[-1].token_ids, 1]
            return outs

    outs = play(run())
    assert [(len(o.token_ids), len(o.logprobs), len(o.versions)) for o in outs] == [(4, 4, 4), (2, 2, 2), (6, 6, 6)]
    assert all(value < 0 for out in outs for value in out.logprobs)


def test_the_factory_loads_the_model_folder_of_the_run(tmp_path: Path) -> None:
    model = build("gemma2")
    model.save_pretrained(tmp_path / "model")
    config = RunConfig.model_validate(
        {
            "model": {"name": "gemma2"},
            "env": [{"id": "a/B-v0"}],
            "train": {"steps": 0, "groups_per_step": 1, "group_size": 2},
        }
    )
    context = RunContext(config=config, run_dir=tmp_path, model_path=tmp_path / "model", tokenizer=build_tokenizer())

    async def run() -> Completion:
        sampler = LocalSampler(context, LocalSamplerOptions(dtype="float32", device="cpu"))
        with pytest.raises(SamplerError, match="not started"):
            sampler.open_session()
        await sampler.start()
        assert sampler.max_context == 256
        out = await complete(sampler, prompt(0, 12), seed=3)
        await sampler.aclose()
        return out

    check_exact(model, prompt(0, 12), play(run()), seed=3)


def test_tied_weights_may_come_under_either_name_and_any_dtype() -> None:
    new = build("qwen3", seed=1)
    tensors = {name: tensor.detach().double() for name, tensor in new.named_parameters()}
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    async def run() -> Completion:
        async with serving(build("qwen3")) as sampler:
            await sampler.update_weights(tensors.items(), 0)
            return await complete(sampler, prompt(0, 9), seed=1)

    check_exact(new, prompt(0, 9), play(run()), seed=1)


@pytest.mark.parametrize("deterministic", [True, False])
def test_more_episodes_than_slots_evict_each_other_and_stay_exact(deterministic: bool) -> None:
    model = build()

    async def episode(sampler: LocalSampler, seed: int) -> None:
        session = sampler.open_session()
        ids = prompt(seed, 5 + seed)
        for turn in range(3):
            out = await session.generate(ids, SamplingParams(max_new_tokens=3 + (seed + turn) % 4, seed=seed))
            check_exact(model, ids, out, seed=seed)
            ids = [*ids, *out.token_ids, *prompt(100 + seed, 4)]
            await asyncio.sleep(0.001 * (seed % 3))
        session.close()

    async def run() -> None:
        async with serving(model, max_slots=2, deterministic=deterministic) as sampler:
            await asyncio.wait_for(asyncio.gather(*(episode(sampler, seed) for seed in range(5))), 60)

    play(run())


def test_a_rerun_is_bit_identical_whatever_the_environments_timing() -> None:
    model = build()

    async def episode(sampler: LocalSampler, index: int, delays: np.random.Generator) -> list[Completion]:
        session = sampler.open_session()
        ids, outs = prompt(index // 4, 12), []
        for turn in range(3):
            await asyncio.sleep(float(delays.uniform(0, 0.004)))
            out = await session.generate(ids, SamplingParams(max_new_tokens=3 + (index * 7 + turn) % 9))
            outs.append(out)
            ids = [*ids, *out.token_ids, *prompt(50 + turn, 1 + index)]
        session.close()
        return outs

    async def run(seed: int) -> list[list[Completion]]:
        delays = np.random.default_rng(seed)
        async with serving(model, max_slots=6) as sampler:
            return list(await asyncio.gather(*(episode(sampler, i, delays) for i in range(8))))

    first, second = play(run(1)), play(run(2))
    assert first == second
    assert all(len(outs) == 3 for outs in first)


def test_deterministic_waits_for_the_environments_and_the_other_mode_does_not() -> None:
    async def run(deterministic: bool) -> bool:
        async with serving(build(), deterministic=deterministic) as sampler:
            thinking = sampler.open_session()
            task = asyncio.create_task(complete(sampler, prompt(0, 4), max_new_tokens=2))
            await asyncio.sleep(0.2)
            done = task.done()
            thinking.close()
            assert len((await asyncio.wait_for(task, 30)).token_ids) == 2
            assert (sampler.metrics()["wait_seconds"] > 0.1) is deterministic
            return done

    assert play(run(True)) is False
    assert play(run(False)) is True


def test_stop_token_ends_the_completion_and_is_kept() -> None:
    model = build()
    ids = prompt(0, 6)

    async def run(**params: Any) -> Completion:
        async with serving(model) as sampler:
            return await complete(sampler, ids, temperature=0.0, max_new_tokens=12, **params)

    full = play(run())
    stop = full.token_ids[5]
    out = play(run(stop_token_ids=(stop,)))
    assert out.token_ids == full.token_ids[: full.token_ids.index(stop) + 1]
    assert (full.finish_reason, out.finish_reason) == (FinishReason.LENGTH, FinishReason.STOP)


def test_stop_string_that_spans_tokens_ends_the_completion() -> None:
    model, tokenizer = build(), build_tokenizer()
    ids = prompt(0, 6)

    async def run(**params: Any) -> Completion:
        async with serving(model) as sampler:
            return await complete(sampler, ids, max_new_tokens=20, seed=4, **params)

    full = play(run())
    stop = tokenizer.decode(list(full.token_ids[7:10]))
    assert len(stop) == 3
    out = play(run(stop=("never", stop)))
    assert (out.token_ids, out.finish_reason) == (full.token_ids[:10], FinishReason.STOP)
