"""The parts of the local sampler: sampling from logits, cache rows, packed layers, choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from local_sampler_kit import SHAPE, build
from transformers import (
    LlamaConfig,
    MistralConfig,
)

from relax_gym.errors import ConfigError, SamplerError
from relax_gym.sampler import SamplingParams
from relax_gym_plugins.samplers.local.cache import SlotCache
from relax_gym_plugins.samplers.local.engine import LocalEngine
from relax_gym_plugins.samplers.local.model import attention_windows
from relax_gym_plugins.samplers.local.options import LocalSamplerOptions
from relax_gym_plugins.samplers.local.packing import PackedLinears
from relax_gym_plugins.samplers.local.sampler import choose_device, choose_dtype
from relax_gym_plugins.samplers.local.sampling import BatchParams, sample, uniform


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
    assert draw(LOGITS, logit_bias={0: -np.inf}, top_k=1)[1] == pytest.approx(np.log(0.3 / 0.6), abs=1e-6)
    assert draw(LOGITS, logit_bias={1: 50.0})[1] == pytest.approx(0.0, abs=1e-6)
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
