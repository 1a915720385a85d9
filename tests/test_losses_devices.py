"""The loss of each algorithm where the model is on another device than its samples. "meta" stands for a GPU: it refuses
tensors of other devices in the same way, and computes nothing."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import random_batch
from megatron_learner_kit import Case, Folders
from test_megatron_learner import ALGORITHMS

from relax_gym.config import load_algorithms
from relax_gym_trainers.torch_learner.update import Tally, differentiate, plan


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Folders(tmp_path_factory.mktemp("models"))["dense"]


@pytest.mark.parametrize("case", ALGORITHMS.values(), ids=ALGORITHMS)
def test_what_was_computed_before_is_brought_to_the_models_device(
    case: Case, dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "autocast", lambda *args, **options: contextlib.nullcontext())  # knows no "meta"
    part = plan(random_batch(0, groups=2, size=3).samples, budget=1000, share_prefix=False, skip_flat=False)
    batch = part.micro_batches[0]
    there = torch.zeros(len(batch.targets), device="meta", requires_grad=True)
    here = torch.from_numpy(np.zeros(len(batch.targets), dtype=np.float32))
    for algorithm in load_algorithms(case.context(dense).config):
        for old in (None, here):
            before: dict[str, Any] = {"old": old, "reference": here if algorithm.kl_coef else None}
            loss, gradients = differentiate(
                algorithm, part, batch, there, [(there.detach(), 0.1)], **before, tally=Tally(), first=True
            )
            assert {loss.device.type, *(grad.device.type for _, grad in gradients if grad is not None)} == {"meta"}


def test_one_name_is_counted_on_several_devices() -> None:
    tally = Tally()
    for device in ("cpu", "meta", "cpu", "meta"):
        value = torch.zeros(3, dtype=torch.float64, device=device)
        tally.mean(opd_kl=value)
        tally.share("clip_fraction", value == 0, among=value == 0)
    assert {total.device.type for total in tally.sums.values()} == {"meta"}
    assert tally.counts["opd_kl"] == 12
