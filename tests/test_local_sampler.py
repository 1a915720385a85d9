"""The local sampler against a plain full forward of the same model, in float32 on tiny models built in code."""

from __future__ import annotations

import asyncio
import copy
import string
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from relax_gym.config import RunConfig
from relax_gym.context import RunContext
from relax_gym.errors import ConfigError, SamplerError
from relax_gym.sampler import SamplingParams
from relax_gym.types import Completion, FinishReason
from relax_gym_plugins.samplers.local.cache import SlotCache
from relax_gym_plugins.samplers.local.engine import LocalEngine
from relax_gym_plugins.samplers.local.model import attention_windows
from relax_gym_plugins.samplers.local.options import LocalSamplerOptions
from relax_gym_plugins.samplers.local.packing import PackedLinears
from relax_gym_plugins.samplers.local.sampler import LocalSampler, choose_device, choose_dtype
from relax_gym_plugins.samplers.local.sampling import BatchParams, sample, uniform

VOCABULARY = 97
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8, "tie_word_embeddings": True}),
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {"head_dim": 8, "sliding_window": 8}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 8}),
}


def build(kind: str = "qwen3", seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config, model, extra = KINDS[kind]
    built: PreTrainedModel = model(config(**SHAPE, **extra)).float().eval()
    return built


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each printable character."""
    vocabulary = {character: index for index, character in enumerate(string.printable[:VOCABULARY])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()


def play(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run; a hang is a failure."""
    return asyncio.run(asyncio.wait_for(coroutine, 60))


@asynccontextmanager
async def serving(model: PreTrainedModel, **options: Any) -> AsyncIterator[LocalSampler]:
    sampler = LocalSampler.from_engine(
        LocalEngine(copy.deepcopy(model), build_tokenizer(), LocalSamplerOptions(dtype="float32", **options))
    )
    await sampler.start()
    try:
        yield sampler
    finally:
        await sampler.aclose()


async def complete(sampler: LocalSampler, ids: Sequence[int], **params: Any) -> Completion:
    session = sampler.open_session()
    try:
        return await session.generate(ids, SamplingParams(**{"max_new_tokens": 8, **params}))
    finally:
        session.close()


def await_tokens(sampler: LocalSampler, count: int) -> None:
    """Return once `count` tokens are sampled."""
    while count > 0:
        count -= int(sampler.metrics()["generated_tokens"])


@torch.no_grad()
def scores(model: PreTrainedModel, ids: Sequence[int], temperature: float = 1.0) -> np.ndarray[Any, Any]:
    """Log-probs [T, vocabulary] of a plain forward without any cache."""
    logits = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].double()
    return torch.log_softmax(logits / (temperature or 1.0), dim=-1).numpy()


def check_exact(
    model: PreTrainedModel, ids: Sequence[int], out: Completion, *, temperature: float = 1.0, seed: int = 0
) -> None:
    """Tokens and log-probs are those of a plain full forward and a plain inverse CDF."""
    table = scores(model, [*ids, *out.token_ids], temperature)
    for index, (token, logprob) in enumerate(zip(out.token_ids, out.logprobs, strict=True)):
        place = len(ids) + index
        row = table[place - 1]
        if temperature == 0:
            expected = int(row.argmax())
        else:
            number = uniform(np.array([seed], dtype=np.uint64), np.array([place], dtype=np.uint64))[0]
            expected = int(np.searchsorted(np.exp(row).cumsum(), number, side="right"))
        assert token == expected, f"token {index}"
        assert abs(logprob - row[token]) <= 1e-4


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


def test_packed_linear_layers_multiply_with_the_newest_weights() -> None:
    layer = torch.nn.Linear(512, 300)
    states = torch.randn(3, 512)
    packed = PackedLinears(layer)
    for _ in range(2):
        expected = states @ layer.weight.T + layer.bias
        assert torch.allclose(layer(states), expected, atol=1e-4)
        with torch.no_grad():
            layer.weight.normal_()
        packed.refresh()


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


def test_the_context_ends_a_completion_with_length() -> None:
    async def run() -> None:
        async with serving(build(), max_context=24) as sampler:
            assert sampler.max_context == 24
            out = await complete(sampler, prompt(0, 20), max_new_tokens=50)
            assert (len(out.token_ids), out.finish_reason) == (4, FinishReason.LENGTH)
            out = await complete(sampler, prompt(0, 24), max_new_tokens=50)
            assert (out.token_ids, out.finish_reason) == ((), FinishReason.LENGTH)
            with pytest.raises(SamplerError, match=r"25 tokens; the local sampler takes 1 to 24"):
                await complete(sampler, prompt(0, 25))
            with pytest.raises(SamplerError, match=r"0 tokens"):
                await complete(sampler, [])
            with pytest.raises(SamplerError, match=r"token id 97 is not in the model's vocabulary of 97"):
                await complete(sampler, [3, 97])
            with pytest.raises(SamplerError, match=r"token id -1 is not"):
                await complete(sampler, [3], logit_bias={-1: 1.0})

    play(run())


def test_cancelling_aborts_the_request_and_the_session_goes_on() -> None:
    model = build()

    async def run() -> None:
        async with serving(model) as sampler:
            session = sampler.open_session()
            task = asyncio.create_task(session.generate(prompt(0, 5), SamplingParams(max_new_tokens=240)))
            await asyncio.to_thread(await_tokens, sampler, 3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            out = await session.generate(prompt(0, 5), SamplingParams(max_new_tokens=5, seed=2))
            check_exact(model, prompt(0, 5), out, seed=2)
            session.close()

    play(run())


def test_closing_a_session_aborts_its_request_with_what_it_has() -> None:
    async def run() -> None:
        async with serving(build()) as sampler:
            session = sampler.open_session()
            task = asyncio.create_task(session.generate(prompt(0, 5), SamplingParams(max_new_tokens=240)))
            await asyncio.to_thread(await_tokens, sampler, 3)
            session.close()
            session.close()
            out = await task
            assert out.finish_reason is FinishReason.ABORT
            assert 3 <= len(out.token_ids) < 240
            with pytest.raises(SamplerError, match="the session is closed"):
                await session.generate(prompt(0, 5), SamplingParams(max_new_tokens=1))

    play(run())


def test_one_session_serves_one_request_at_a_time() -> None:
    async def run() -> None:
        async with serving(build()) as sampler:
            session = sampler.open_session()
            task = asyncio.create_task(session.generate(prompt(0, 5), SamplingParams(max_new_tokens=100)))
            await asyncio.sleep(0)
            with pytest.raises(SamplerError, match="already has a request in flight"):
                await session.generate(prompt(1, 5), SamplingParams(max_new_tokens=1))
            assert len((await task).token_ids) == 100

    play(run())


def test_a_crash_of_the_engine_fails_pending_and_later_requests() -> None:
    class Broken(Qwen3ForCausalLM):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
            if input_ids.shape[1] > 1:
                raise RuntimeError("the matrix is tired")
            return super().forward(input_ids=input_ids, **kwargs)

        forward.__signature__ = __import__("inspect").signature(Qwen3ForCausalLM.forward)  # type: ignore[attr-defined]

    async def run() -> None:
        model = Broken(Qwen3Config(**SHAPE, head_dim=8))
        async with serving(model) as sampler:
            jobs = [complete(sampler, prompt(i, 5)) for i in range(3)]
            outcomes = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 30)
            for outcome in [*outcomes, *await asyncio.gather(complete(sampler, [1, 2]), return_exceptions=True)]:
                assert isinstance(outcome, SamplerError)
                assert "RuntimeError: the matrix is tired" in str(outcome)
            with pytest.raises(SamplerError, match="the matrix is tired"):
                await sampler.update_weights(model.named_parameters(), 1)

    play(run())


def test_a_model_that_gives_nan_is_an_error_and_good_weights_heal_it() -> None:
    good = build()
    bad = {name: torch.full_like(tensor, float("nan")) for name, tensor in good.named_parameters()}

    async def run() -> None:
        async with serving(good) as sampler:
            await sampler.update_weights(bad.items(), 0)
            with pytest.raises(SamplerError, match="the model gives NaN"):
                await complete(sampler, prompt(0, 30))
            await sampler.update_weights(good.named_parameters(), 1)
            check_exact(good, prompt(0, 5), await complete(sampler, prompt(0, 5), seed=1), seed=1)

    play(run())


def test_closing_is_idempotent_and_fails_what_is_pending() -> None:
    async def run() -> None:
        async with serving(build()) as sampler:
            sampler.open_session()
            task = asyncio.create_task(complete(sampler, prompt(0, 5)))
            await asyncio.sleep(0.01)
            await sampler.aclose()
            await sampler.aclose()
            with pytest.raises(SamplerError, match="closed"):
                await asyncio.wait_for(task, 30)
            with pytest.raises(SamplerError, match="closed"):
                await complete(sampler, prompt(0, 5))

    play(run())


def test_memory_grows_with_use_only() -> None:
    async def run() -> None:
        async with serving(build(), max_slots=64) as sampler:
            pool = sampler.engine._runner.cache
            assert (pool.rows, pool.length) == (0, 0)
            await complete(sampler, prompt(0, 5))
            assert (pool.rows, pool.length) == (8, 64)
            await complete(sampler, prompt(0, 70))
            assert (pool.rows, pool.length) == (8, 128)

    play(run())


def draw(logits: Sequence[float], seeds: int = 400, **params: Any) -> tuple[set[int], float]:
    """The tokens that come up over many seeds, and the log-prob of the last one."""
    rows = torch.tensor([list(logits)] * seeds)
    chosen = [SamplingParams(max_new_tokens=1, **params)] * seeds
    batch = BatchParams(chosen, list(range(seeds)), torch.device("cpu"))
    tokens, logprobs = sample(rows, np.zeros(seeds, dtype=np.uint64), batch)
    return set(tokens), logprobs[-1]


LOGITS = [float(np.log(weight)) for weight in (0.4, 0.1, 0.3, 0.2)]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, {0, 1, 2, 3}),
        ({"temperature": 0.0}, {0}),
        ({"top_k": 1}, {0}),
        ({"top_k": 3}, {0, 2, 3}),
        ({"top_p": 0.39}, {0}),
        ({"top_p": 0.41}, {0, 2}),
        ({"top_p": 0.75}, {0, 2, 3}),
        ({"top_k": 2, "top_p": 0.5}, {0}),
        ({"min_p": 0.51}, {0, 2}),
        ({"min_p": 1.0}, {0}),
        ({"logit_bias": {0: float("-inf"), 1: 50.0}}, {1}),
        ({"temperature": 0.0, "logit_bias": {3: 5.0}}, {3}),
        ({"top_k": 1, "logit_bias": {1: 9.0}}, {1}),
    ],
)
def test_filters(params: dict[str, Any], expected: set[int]) -> None:
    assert draw(LOGITS, **params)[0] == expected


def test_k35_k37_the_logprob_is_the_sampled_tokens_in_the_full_distribution_at_the_temperature() -> None:
    assert draw(LOGITS, top_k=1)[1] == pytest.approx(np.log(0.4), abs=1e-6)
    assert draw(LOGITS, temperature=0.0)[1] == pytest.approx(np.log(0.4), abs=1e-6)
    assert draw(LOGITS, logit_bias={1: 50.0})[1] == pytest.approx(np.log(0.1), abs=1e-6)
    assert draw(LOGITS, top_k=1, temperature=0.5)[1] == pytest.approx(np.log(0.16 / 0.30), abs=1e-6)


def test_k36_temperature_shapes_the_distribution() -> None:
    rows, seeds = torch.tensor([LOGITS] * 20_000), list(range(20_000))
    chosen = [SamplingParams(max_new_tokens=1, temperature=0.5)] * 20_000
    tokens, _ = sample(rows, np.zeros(20_000, dtype=np.uint64), BatchParams(chosen, seeds, torch.device("cpu")))
    frequency = np.bincount(tokens, minlength=4) / 20_000
    assert frequency == pytest.approx(np.array([16, 1, 9, 4]) / 30, abs=0.015)


def test_one_batch_mixes_all_kinds_of_parameters() -> None:
    kinds = [{}, {"temperature": 0.0}, {"top_k": 2}, {"logit_bias": {7: 99.0}}, {"top_p": 0.5, "temperature": 2.0}]
    params = [SamplingParams(max_new_tokens=1, **kind) for kind in kinds]
    logits = torch.randn(5, 600, generator=torch.Generator().manual_seed(0)) * 3
    places = np.arange(5, dtype=np.uint64)
    tokens, logprobs = sample(logits, places, BatchParams(params, [1, 2, 3, 4, 5], torch.device("cpu")))
    for row in range(5):
        alone = BatchParams([params[row]], [row + 1], torch.device("cpu"))
        assert sample(logits[row : row + 1], places[row : row + 1], alone) == ([tokens[row]], [logprobs[row]])
    assert tokens[1] == int(logits[1].argmax()) and tokens[3] == 7


def test_uniform_numbers_are_fixed_and_even() -> None:
    seeds, places = np.arange(100, dtype=np.uint64), np.arange(100, dtype=np.uint64)
    numbers = uniform(np.repeat(seeds, 100), np.tile(places, 100))
    assert numbers.min() >= 0 and numbers.max() < 1
    assert numbers.mean() == pytest.approx(0.5, abs=0.01)
    assert len(np.unique(numbers)) == 10_000
    assert np.corrcoef(numbers[:-1], numbers[1:])[0, 1] == pytest.approx(0, abs=0.03)


def test_rows_move_in_the_cache() -> None:
    cache = SlotCache({0: ((1, 2), (1, 3))}, max_rows=4, max_length=32, dtype=torch.float32, device=torch.device("cpu"))
    cache.reserve(2, 5)
    assert [tuple(pool.shape) for pool in cache.pools] == [(1, 4, 32, 1, 2), (1, 4, 32, 1, 3)]
    cache.pools[0][0, 0] = 1
    cache.pools[0][0, 1] = 2
    cache.swap(0, 1, 4)
    assert cache.pools[0][0, :2, :6, 0, 0].tolist() == [[2, 2, 2, 2, 1, 1], [1, 1, 1, 1, 2, 2]]
    cache.copy(1, 2, 1, 5)
    assert cache.pools[0][0, 2, :6, 0, 0].tolist() == [0, 1, 1, 1, 2, 0]
    cache.clear()
    assert float(cache.pools[0].abs().sum()) == 0


def test_layers_that_cannot_be_batched_are_refused() -> None:
    config = LlamaConfig(**SHAPE)
    assert attention_windows(config) == ({"full_attention": None}, False)
    assert attention_windows(MistralConfig(**SHAPE, sliding_window=8)) == ({"full_attention": 8}, False)
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(SamplerError, match="llama has layers of type linear_attention"):
        attention_windows(config)


def test_choices() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_dtype("float32", torch.device("cpu")) is torch.float32
    assert choose_dtype("auto", torch.device("cuda")) is torch.bfloat16
    with pytest.raises(ConfigError, match=r"sampler.max_context = 300: the model has only 256 positions"):
        LocalEngine(build(), None, LocalSamplerOptions(max_context=300))
    with pytest.raises(ConfigError, match="device = 'quantum'"):
        choose_device("quantum")
