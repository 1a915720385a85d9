"""Logits → tokens and log-probs, all rows at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_gym.sampler import SamplingParams

BLOCK = 256


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position): splitmix64's finalizer, applied twice to mix both."""
    with np.errstate(over="ignore"):
        return (_mix(_mix(seeds) + positions) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


class BatchParams:
    """The sampling parameters of a batch, as tensors; built once for as long as the batch stays the same."""

    def __init__(self, params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device) -> None:
        self.device = device
        self.seeds = np.array(seeds, dtype=np.uint64)
        self.greedy = [row for row, p in enumerate(params) if p.temperature == 0]
        self.biased = any(p.logit_bias for p in params)
        self.filtered = [
            row for row, p in enumerate(params) if p.temperature > 0 and (p.top_k or p.top_p < 1 or p.min_p)
        ]
        entries = [(row, *entry) for row, p in enumerate(params) for entry in p.logit_bias.items()]
        self.bias_rows = torch.tensor([row for row, _, _ in entries], dtype=torch.long, device=device)
        self.bias_ids = torch.tensor([id for _, id, _ in entries], dtype=torch.long, device=device)
        self.bias = torch.tensor([value / (params[row].temperature or 1.0) for row, _, value in entries], device=device)
        chosen = [params[row] for row in self.filtered]
        self.top_k = torch.tensor([[p.top_k or 2**62] for p in chosen], device=device)
        self.top_p = torch.tensor([[p.top_p] for p in chosen], dtype=torch.float64, device=device)
        self.min_p = torch.tensor([[p.min_p] for p in chosen], device=device)
        temperatures = [p.temperature or 1.0 for p in params]
        self.temperature = (
            None if set(temperatures) == {1.0} else torch.tensor(temperatures, device=device).unsqueeze(1)
        )


def sample(logits: Tensor, positions: NDArray[np.uint64], batch: BatchParams) -> tuple[list[int], list[float]]:
    """Choose one token for each row of `logits` [n, vocabulary].

    `positions` [n] are the places the new tokens take in their contexts; with the row's seed they choose the uniform
    number whose inverse in the row's cumulative distribution is the token. The log-probs are those of the whole
    distribution with the row's bias at its temperature, whatever filter chose the token.
    """
    scores = logits.float()
    if batch.temperature is not None:
        scores = scores / batch.temperature
    if batch.biased:
        scores = scores.index_put((batch.bias_rows, batch.bias_ids), batch.bias, accumulate=True)
    probabilities = weights = torch.softmax(scores, dim=1)
    if batch.filtered:
        weights = probabilities.clone()
        weights[batch.filtered] = _filter(weights[batch.filtered], batch)
    numbers = torch.from_numpy(uniform(batch.seeds, positions)).to(logits.device)
    tokens = _inverse_cdf(weights, numbers)
    if batch.greedy:
        tokens[batch.greedy] = scores[batch.greedy].argmax(dim=1)
    picked = probabilities.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return tokens.tolist(), picked.double().log().tolist()


def _blocks(weights: Tensor) -> Tensor:
    """View [n, vocabulary] as [n, blocks, BLOCK], padded with zeros where needed."""
    missing = -weights.shape[1] % BLOCK
    if missing:
        weights = torch.nn.functional.pad(weights, (0, missing))
    return weights.view(weights.shape[0], -1, BLOCK)


def _inverse_cdf(weights: Tensor, numbers: Tensor) -> Tensor:
    """The first token whose cumulative weight exceeds `number` × total: first its block, then itself."""
    rows = torch.arange(weights.shape[0], device=weights.device)
    blocks = _blocks(weights)
    sums = blocks.sum(dim=2).double()
    block, before = _first_above(sums, numbers * sums.sum(dim=1))
    inside = blocks[rows, block].double()
    token, _ = _first_above(inside, before)
    return block * BLOCK + token


def _first_above(parts: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """For each row the first index whose cumulative sum exceeds `target`, and what of `target` is left for it.

    The target is kept below the total, so that the index always has a positive part, whatever the rounding.
    """
    cumulative = parts.cumsum(dim=1)
    below = torch.nextafter(cumulative[:, -1], torch.zeros_like(target))
    target = torch.minimum(target, below).unsqueeze(1)
    index = (cumulative <= target).sum(dim=1, keepdim=True)
    left = target - cumulative.gather(1, index) + parts.gather(1, index)
    return index.squeeze(1), left.clamp_(min=0).squeeze(1)


def _filter(weights: Tensor, batch: BatchParams) -> Tensor:
    """Zero what top-k, then top-p of the rest, then min-p exclude. The likeliest token always stays."""
    ordered, order = weights.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(weights.shape[1], device=weights.device)
    ordered = ordered.masked_fill(rank >= batch.top_k, 0)
    mass = ordered.double().cumsum(dim=1)
    outside = (mass - ordered) >= batch.top_p * mass[:, -1:]
    outside |= ordered < batch.min_p * ordered[:, :1]
    outside[:, 0] = False
    return torch.zeros_like(weights).scatter_(1, order, ordered.masked_fill_(outside, 0))
