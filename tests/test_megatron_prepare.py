"""What ranks compute before a step is what the step would have computed, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from learner_cases import context, save_model, weights
from megatron_learner_kit import TINY, Case, batches, on_ranks, outcome, rank_learner, without_times
from transformers import Qwen3Config

from relax_gym_trainers.megatron_learner.parallel import Layout
from relax_gym_trainers.megatron_learner.rank_service import Place
from relax_gym_trainers.torch_learner.scores import by_group


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = save_model(tmp_path_factory.mktemp("models") / "tiny", Qwen3Config(**TINY))
    context(folder).tokenizer.save_pretrained(folder)
    return str(folder)


def both(layout: Layout, place: Place, folder: str, case: Case) -> list[Any]:
    """Without and with preparing; nothing is scored in a step whose groups were prepared."""
    plain = rank_learner(layout, place, 0, Path(folder), case)
    found = [outcome(plain, case)]
    plain.close()
    ahead = rank_learner(layout, place, 1, Path(folder), case)
    metrics = []
    for batch in case.steps:
        for group in reversed(by_group(batch.samples)):
            ahead.prepare(group)
        known = [len(scores._known) for scores in (ahead.objectives[0].reference, ahead.objectives[0].policy)]
        assert known == [2, 2]
        metrics.append(ahead.step(batch))
        assert not ahead.objectives[0].reference._known
    found.append(type(found[0])(metrics, weights(ahead)))
    ahead.close()
    return found


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2),
        pytest.param(Layout(tp=2, pp=2), marks=pytest.mark.slow),
        pytest.param(Layout(cp=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_preparing_changes_no_bit(model: str, layout: Layout) -> None:
    algorithm = {"kl_coef": 0.1, "old_logprobs": "recompute"}
    case = Case(algorithm=algorithm, options={"epochs": 2}, steps=batches(2))
    for plain, ahead in on_ranks(layout, both, model, case):
        assert without_times(plain.metrics) == without_times(ahead.metrics)
        assert plain.metrics[1]["kl"] > 0
        assert all(torch.equal(plain.weights[name], value) for name, value in ahead.weights.items())


def passes(layout: Layout, place: Place, folder: str, case: Case) -> list[int]:
    """How many micro-batches each pass of the reference has, in a step of several groups."""
    learner = rank_learner(layout, place, 0, Path(folder), case)
    read, found = learner.backend.read, []

    def counted(micro_batches: Any, look: Any) -> Any:
        found.append(len(micro_batches))
        return read(micro_batches, look)

    learner.backend.read = counted  # type: ignore[method-assign]
    learner.step(case.steps[0])
    learner.close()
    return [count for count in found if count]


def test_all_groups_go_through_the_pipeline_in_one_pass(model: str) -> None:
    case = Case(algorithm={"kl_coef": 0.1}, steps=batches(1, groups=5))
    (count,) = on_ranks(Layout(), passes, model, case)[0]
    assert count >= 5
