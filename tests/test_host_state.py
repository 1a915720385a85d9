"""Moments that come to a GPU and leave it while an optimizer steps: whatever its streams do first, nothing is lost."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu
from torch import Tensor

from relax_gym_trainers import host_state
from relax_gym_trainers.host_state import HostState, restore

SIZES = (3, 5, 4, 4, 6, 2, 8, 1, 7)
PIECE, LARGEST = 8, 10
"""Numbers that fill a piece, of two moments each; and those of the largest: it ends with what fills it."""


class Counting(torch.optim.AdamW):
    """Counts its steps in its groups too, as Transformer Engine's does."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        super().step(closure)


class Update:
    """Two groups of weights; every other weight is the model's own, the rest are copies."""

    def __init__(self, gpu: FakeGpu | None) -> None:
        self._put = gpu.put if gpu else torch.clone
        self._generator = torch.Generator().manual_seed(0)
        self.weights = [torch.nn.Parameter(self._put(self._random(size))) for size in SIZES]
        groups = [{"params": self.weights[:5]}, {"params": self.weights[5:], "lr": 0.1}]
        self.optimizer = Counting(groups, weight_decay=0.1, fused=True)
        self.host = HostState([self.optimizer], [torch.nn.ParameterList(self.weights[::2])]) if gpu else None

    def _random(self, size: int) -> Tensor:
        return torch.randn(size, generator=self._generator)

    def step(self) -> None:
        for weight in self.weights:
            weight.grad = self._put(self._random(weight.numel()))
        for size in SIZES:  # memory that the main stream is not done with yet, as clipping leaves it
            self._put(torch.ones(size))
        self.optimizer.step()
        for weight in self.weights:
            weight.grad = None

    def offloaded(self) -> None:
        assert self.host is not None
        with self.host.on_device():
            self.step()

    def tensors(self) -> list[list[Tensor]]:
        """Each weight and its moments, as they are."""
        state = self.optimizer.state
        return [
            [w.detach(), *(state[w][name] for name in ("exp_avg", "exp_avg_sq") if name in state[w])]
            for w in self.weights
        ]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(map(torch.equal, some, others))


@functools.cache
def wanted(steps: int) -> list[list[Tensor]]:
    """Weights and moments after so many steps without a GPU. Before the first, moments are taken for 0."""
    update = Update(None)
    for _ in range(steps):
        update.step()
    return [[*some, *(torch.zeros_like(some[0]) for _ in range(3 - len(some)))] for some in update.tensors()]


def fake_gpu(patch: pytest.MonkeyPatch, seed: int) -> FakeGpu:
    patch.setattr(host_state, "PIECE_BYTES", 8 * PIECE)
    patch.setattr(host_state, "_lanes", functools.cache(host_state._lanes.__wrapped__))
    return FakeGpu(patch, seed)


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_first_steps_are_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    times = [wanted(steps) for steps in range(5)]
    with fake_gpu(monkeypatch, seed) as gpu:
        update = Update(gpu)
        for number in range(4):
            others = gpu.floats + sum(SIZES[1::2]) + sum(SIZES) + (len(SIZES) if number == 0 else 0)
            gpu.peak = 0  # above copies of weights, gradients and, from the first step on, counts of steps
            update.offloaded()
            assert gpu.peak <= others + 2 * 2 * LARGEST
            for place, (now, then) in enumerate(zip(update.tensors(), times[number + 1], strict=True)):
                own = place % 2 == 0  # a weight of the model's
                assert [tensor.is_cuda for tensor in now] == [own, False, False]
                assert same(now[own:], then[own:])  # nothing has to be waited for
                assert all(tensor.is_cuda or tensor.is_pinned() for tensor in now)
            gpu.settle()
            assert all(map(same, update.tensors(), times[number + 1]))
            assert [group["count"] for group in update.optimizer.param_groups] == [number + 1] * 2


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("before", "what"),
    [(0, "GPU memory"), (0, "host memory"), (0, "_fused_adamw_"), (1, "GPU memory"), (1, "_fused_adamw_")],
)
def test_an_update_that_fails_loses_nothing(before: int, what: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it does, and what is a GPU's is given back."""
    times = [wanted(before), wanted(before + 1)]
    failures = 0
    while True:
        with fake_gpu(monkeypatch, seed) as gpu:
            update = Update(gpu)
            for _ in range(before):
                update.offloaded()
            groups = update.optimizer.param_groups
            gpu.fails = (what, gpu.asked[what] + failures + 1)
            try:
                update.offloaded()
            except torch.OutOfMemoryError:
                failures += 1
            else:
                break
            assert update.optimizer.param_groups is groups and "step" not in vars(update.optimizer)
            for place, now in enumerate(update.tensors()):
                assert [tensor.is_cuda for tensor in now] == [place % 2 == 0, *(False for _ in now[1:])]
            gpu.settle()
            for now, *then in zip(update.tensors(), *times, strict=True):
                assert any(same(now, one) for one in then)
    assert failures >= 5  # the number of pieces


def test_both_directions_are_used_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = set()
    for seed in range(10):
        with fake_gpu(monkeypatch, seed) as gpu:
            update = Update(gpu)
            update.offloaded()
            asked, gpu.at_once = gpu.asked["host memory"], 0
            update.offloaded()
            assert gpu.asked["host memory"] == asked  # what is there is used again
            at_once.add(gpu.at_once)
    assert max(at_once) == 2


def test_what_a_checkpoint_brings_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    then = wanted(2)
    with fake_gpu(monkeypatch, 0) as gpu:
        update = Update(gpu)
        assert update.host is not None
        update.offloaded()
        for state in update.optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].clone()
        update.host.leave()
        assert all(tensor.is_pinned() for _, *moments in update.tensors() for tensor in moments)
        update.offloaded()
        gpu.settle()
        assert all(map(same, update.tensors(), then))


def test_moments_of_a_checkpoint_are_never_all_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    then = wanted(2)
    with fake_gpu(monkeypatch, 0) as gpu:
        update = Update(gpu)
        update.offloaded()
        gpu.settle()
        saved = update.optimizer.state_dict()
        states = {name: {key: one.clone() for key, one in state.items()} for name, state in saved["state"].items()}
        update.optimizer.state.clear()
        gpu.peak = gpu.floats
        before = gpu.floats
        restore(update.optimizer, {**saved, "state": states})
        assert gpu.peak == before + len(SIZES)  # counts of steps
        assert not any(tensor.is_cuda for _, *moments in update.tensors() for tensor in moments)
        update.offloaded()
        gpu.settle()
        assert all(map(same, update.tensors(), then))
        assert [group["count"] for group in update.optimizer.param_groups] == [2, 2]
