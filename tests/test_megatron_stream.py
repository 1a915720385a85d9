"""Ranks add up the gradients of groups that are streamed as those of the whole batch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from megatron_learner_kit import Case, Folders, Outcome, batches, mixed, on_ranks, rank_learner
from stream_kit import STREAM, apart, streamed

from relax_gym_trainers.megatron_learner.parallel import Layout
from relax_gym_trainers.megatron_learner.rank_service import Place

pytest_plugins = ["megatron_fixtures"]
pytestmark = pytest.mark.usefixtures("one_thread")


AHEAD = [slice(2, 3), slice(0, 1), slice(3, 4)]


def both(layout: Layout, place: Place, folder: Path, case: Case) -> list[Outcome]:
    """Without and with streaming, group by group in another order than the batch's."""
    found = []
    for number, options in enumerate(({}, STREAM)):
        trainer = rank_learner(layout, place, number, folder, dataclasses.replace(case, options=case.options | options))
        found.append(streamed(trainer, case.steps, AHEAD if options else []))
        trainer.close()
    return found


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        (Layout(dp=2), "dense"),
        pytest.param(Layout(tp=2, pp=2), "dense", marks=pytest.mark.slow),
        pytest.param(Layout(pp=2, vpp=2), "deep", marks=pytest.mark.slow),
        pytest.param(Layout(cp=2), "dense", marks=pytest.mark.slow),
        pytest.param(Layout(dp=2, ep=2), "experts", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_stream(folders: Folders, layout: Layout, model: str) -> None:
    steps = [mixed(batch) for batch in batches(2, groups=4, size=2)]
    envs = ({"loss_weight": 0.5}, {"algorithm": {"name": "sapo", "aggregation": "seq-mean-token-mean"}})
    algorithm = {"kl_coef": 0.1, "entropy_coef": 0.01}
    case = Case(algorithm=algorithm, envs=envs, steps=steps, options={"distributed_optimizer": layout.dp > 1})
    for plain, found in on_ranks(layout, both, folders[model], case):
        assert apart(found, plain) == {}
        assert all(0 < one["streamed_tokens"] < one["trained_tokens"] for one in found.metrics)
