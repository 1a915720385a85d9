"""What is trained on while a step waits for its last groups is what the step would have trained on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from learner_cases import qwen3, random_batch, save_model
from megatron_learner_kit import Case, mixed
from stream_kit import STREAM, apart, streamed

from relax_gym.config import RunConfig, load_algorithms
from relax_gym.errors import ConfigError, TrainingError
from relax_gym.types import TrainingSample
from relax_gym_trainers.torch_learner.learner import TorchLearner
from relax_gym_trainers.torch_learner.options import TorchLearnerOptions
from relax_gym_trainers.torch_learner.scores import by_group

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"), qwen3())


def torch_learner(folder: Path, case: Case, **options: Any) -> TorchLearner:
    told = {"dtype": "float32", "device": "cpu", "lr": 1e-2, "eps": 1e-3, "micro_batch_tokens": 60}
    return TorchLearner(case.context(folder), TorchLearnerOptions(**told | case.options | options))


CASES = {
    "samples": Case(),
    "tokens": Case(algorithm={"name": "dapo"}),
    "norm": Case(algorithm={"name": "dr_grpo", "token_sum_norm": 16.0}),
    "kl": Case(algorithm={"kl_coef": 0.1, "entropy_coef": 0.01}),
    "kl in the reward": Case(algorithm={"kl_reward_coef": 0.1, "old_logprobs": "recompute"}),
    "correction": Case(algorithm={"old_logprobs": "recompute", "correction": "tis"}),
    "mixture": Case(envs=({"loss_weight": 0.5}, {"loss_weight": 2.0})),
}
AHEAD = {
    "each": [slice(2, 3), slice(0, 1), slice(3, 4), slice(1, 2)],
    "some": [slice(1, 3)],
    "none": [],
}


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_the_whole_batch(tiny: Path, name: str, ahead: str) -> None:
    case = CASES[name]
    steps = [random_batch(seed, groups=4) for seed in range(3)]
    steps = [mixed(batch) if len(case.envs) > 1 else batch for batch in steps]
    plain = streamed(torch_learner(tiny, case), steps, [])
    found = streamed(torch_learner(tiny, case, **STREAM), steps, AHEAD[ahead])
    assert apart(found, plain) == {}
    share = {"each": 1.0, "some": 0.5, "none": 0.0}[ahead]
    for metrics, batch in zip(found.metrics, steps, strict=True):
        groups = by_group(batch.samples)
        early = sum(s.trained_tokens for group in groups[1:3] for s in group)
        assert metrics["streamed_tokens"] == (early if ahead == "some" else share * batch.trained_tokens)


def changed(sample: TrainingSample) -> TrainingSample:
    return dataclasses.replace(sample, advantages=2 * sample.advantages)


def test_what_the_step_does_not_have_is_not_trained_on(tiny: Path) -> None:
    steps = [random_batch(seed, groups=4) for seed in range(3)]
    plain = streamed(torch_learner(tiny, Case()), steps, [])
    others = {
        "of another batch": random_batch(9, groups=1).samples,
        "with other advantages": [changed(sample) for sample in by_group(steps[0].samples)[0]],
    }
    for name, samples in others.items():
        trainer = torch_learner(tiny, Case(), **STREAM)
        trainer.prepare(by_group(steps[0].samples)[1])
        trainer.prepare(samples)
        found = streamed(trainer, steps, [])
        assert apart(found, plain) == {}, name
        assert found.metrics[0]["streamed_tokens"] == 0


def test_what_is_there_twice_counts_as_often_as_the_step_has_it(tiny: Path) -> None:
    batch = random_batch(1, groups=4)
    groups = by_group(batch.samples)
    more = dataclasses.replace(batch, samples=[*batch.samples, groups[1][0], groups[3][0]])
    plain = streamed(torch_learner(tiny, Case()), [more], [])
    assert apart(streamed(torch_learner(tiny, Case(), **STREAM), [more], [slice(0, 2)]), plain) == {}
    plain = streamed(torch_learner(tiny, Case()), [batch], [])
    twice = torch_learner(tiny, Case(), **STREAM)
    assert apart(streamed(twice, [batch], [slice(0, 2), slice(1, 3)]), plain) == {}


def test_a_group_that_another_env_has_by_now_begins_anew(tiny: Path) -> None:
    case, batch = CASES["mixture"], random_batch(1, groups=4)
    plain, found = torch_learner(tiny, case), torch_learner(tiny, case, **STREAM)
    found.prepare(by_group(batch.samples)[1])
    assert apart(streamed(found, [mixed(batch)], []), streamed(plain, [mixed(batch)], [])) == {}


def test_what_failed_in_the_middle_is_not_trained_on(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = random_batch(1, groups=4)
    plain, found = torch_learner(tiny, Case()), torch_learner(tiny, Case(), **STREAM)
    first, second, *_ = by_group(batch.samples)
    found.prepare(first)
    accumulate = found.backend.accumulate

    def fails(piece: Any, **options: Any) -> float:
        accumulate(piece, **options)
        raise TrainingError("the device has no memory left")

    with monkeypatch.context() as broken:
        broken.setattr(found.backend, "accumulate", fails)
        with pytest.raises(TrainingError, match="no memory left"):
            found.prepare(second)
    assert apart(streamed(found, [batch], []), streamed(plain, [batch], [])) == {}


def test_a_warm_up_between_leaves_nothing_of_it(tiny: Path) -> None:
    batch = random_batch(1, groups=4)
    plain, found = torch_learner(tiny, Case()), torch_learner(tiny, Case(), **STREAM)
    found.prepare(by_group(batch.samples)[0])
    for trainer in (plain, found):
        trainer.imitate(random_batch(9), lr=1e-2)
    assert apart(streamed(found, [batch], []), streamed(plain, [batch], [])) == {}


def test_broken_numbers_are_named_before_they_are_added(tiny: Path) -> None:
    trainer = torch_learner(tiny, Case(), **STREAM)
    (first, *_), *_ = by_group(random_batch().samples)
    with pytest.raises(TrainingError, match=r"the sampler reported nan as log-prob .* of step 1"):
        trainer.prepare([dataclasses.replace(first, logprobs=first.logprobs * float("nan"))])


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"learner": {"epochs": 2}}, "epochs = 2: what is there before a step is the gradient of one update"),
        ({"sampler": {"name": "sglang", "colocate": True}}, "stream with sampler.colocate"),
        ({"algorithm": {"name": "reinforce_pp"}}, "looks at the whole batch"),
        ({"algorithm": {"name": "grpo", "filter_quantiles": (0.0, 0.5)}}, "looks at the whole batch"),
        (
            {"env": [{"id": "test/None-v0"}, {"id": "test/None-v0", "algorithm": {"name": "dapo"}}]},
            "some average over tokens and some over samples",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused(tiny: Path, sections: dict[str, Any], said: str) -> None:
    plain = Case().context(tiny).config.model_dump(exclude_unset=True)
    config = RunConfig.model_validate(plain | {name: value for name, value in sections.items() if name != "learner"})
    options = TorchLearnerOptions(**STREAM, **sections.get("learner", {}))
    assert load_algorithms(config)
    with pytest.raises(ConfigError, match=said):
        options.check_run(config)
