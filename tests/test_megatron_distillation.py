"""Teachers on Megatron's ranks, as in the torch learner; and the weights of references and teachers in host memory."""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from learner_cases import context, learner, random_batch, sample, save_model
from megatron_learner_kit import (
    EXPERTS,
    OPTIONS,
    TINY,
    Case,
    Outcome,
    batches,
    by_megatron,
    by_torch,
    gap,
    on_ranks,
    outcome,
    rank_learner,
)
from transformers import GPT2Config, Qwen3Config, Qwen3MoeConfig

from relax_gym.errors import ConfigError, ModelError, RelaxGymError, TrainingError
from relax_gym.media.items import Image
from relax_gym.teacher import Teacher, TeacherScores
from relax_gym.types import Batch, Placed
from relax_gym_trainers.megatron_learner import parallel
from relax_gym_trainers.megatron_learner.distillation import RankDistiller, SharedEngine
from relax_gym_trainers.megatron_learner.learner import MegatronLearner
from relax_gym_trainers.megatron_learner.options import MegatronLearnerOptions
from relax_gym_trainers.megatron_learner.parallel import Layout
from relax_gym_trainers.megatron_learner.rank import RankLearner
from relax_gym_trainers.megatron_learner.rank_service import Place
from relax_gym_trainers.torch_learner.distillation import Distiller

ENV, OTHER = "test/None-v0", "test/Other-v0"
TOLERANCE = 1e-5


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A student and teachers of the same vocabulary, by name."""
    root = tmp_path_factory.mktemp("models")
    changed: dict[str, dict[str, Any]] = {
        "student": {"tie_word_embeddings": True},
        "t1": {"tie_word_embeddings": True},
        "t2": {},
    }
    changed |= {"wider": {"vocab_size": 67}, "larger": {"hidden_size": 64}, "uneven": {"num_hidden_layers": 3}}
    made: dict[str, Any] = {
        name: Qwen3Config(**{**TINY, "num_hidden_layers": 4, **values}) for name, values in changed.items()
    }
    made["experts"] = Qwen3MoeConfig(**TINY, **EXPERTS)
    made["gpt2"] = GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1)
    folders = {name: save_model(root / name, config, seed) for seed, (name, config) in enumerate(made.items())}
    for folder in folders.values():
        context(folder).tokenizer.save_pretrained(folder)
    return {name: str(folder) for name, folder in folders.items()}


def opd(teacher: Any, **algorithm: Any) -> dict[str, Any]:
    return {"name": "opd", "teacher" if isinstance(teacher, str) else "teachers": teacher, **algorithm}


def routed(steps: list[Batch]) -> list[Batch]:
    """Every other sample is another env's."""
    envs = (ENV, OTHER)
    return [
        dataclasses.replace(
            batch, samples=[dataclasses.replace(s, env_id=envs[i % 2]) for i, s in enumerate(batch.samples)]
        )
        for batch in steps
    ]


# ---- the same as in the torch learner ----------------------------------------------------------------------------


def cases(models: dict[str, str]) -> dict[str, Case]:
    """Every level and form, with one teacher and with two."""
    both = {ENV: models["t1"], OTHER: models["larger"]}
    mixed = {"rl_weight": 0.5, "opd_weight": 2.0, "entropy_coef": 0.01}
    return {
        "whole": Case(algorithm=opd(both, **mixed, kl_coef=0.1), steps=routed(batches(3)), temperature=0.7),
        "top": Case(
            algorithm=opd(both, **mixed, top_k=4, form="jsd", jsd_alpha=0.3), steps=routed(batches(3)), temperature=1.4
        ),
        "forward": Case(algorithm=opd(models["t2"], form="forward"), options={"updates_per_step": 2, "epochs": 2}),
        "reward": Case(algorithm=opd(models["t1"], level="reward", rl_weight=0.5), steps=batches(2), temperature=0.7),
    }


@pytest.fixture(scope="session")
def by_one(models: dict[str, str]) -> dict[str, Outcome]:
    """What the torch learner makes of each case."""
    return {name: by_torch(Path(models["student"]), case) for name, case in cases(models).items()}


slow = pytest.mark.slow
LAYOUTS = {
    "alone": pytest.param(Layout(), marks=slow),
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2),
    "cp2": pytest.param(Layout(cp=2), marks=slow),
    "dp2": Layout(dp=2),
    "pp2-vpp2": pytest.param(Layout(pp=2, vpp=2), marks=slow),
    "cp2-dp2": pytest.param(Layout(cp=2, dp=2), marks=slow),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_k36_every_layout_distils_as_the_torch_learner(
    models: dict[str, str], by_one: dict[str, Outcome], layout: Layout
) -> None:
    found = by_megatron(layout, Path(models["student"]), list(cases(models).values()))
    for (name, one), ours in zip(by_one.items(), found, strict=True):
        assert one.metrics[0]["opd_kl"] > 0.01
        assert {"loss", "grad_norm", "opd_kl", "teacher_logprob", "weights"} <= set(gap(ours, one))
        assert max(gap(ours, one).values()) < TOLERANCE, name


def clean(batch: Batch, never: tuple[int, ...]) -> Batch:
    """Without the ids that are never sampled."""
    ids = [np.where(np.isin(one.token_ids, never), 7, one.token_ids).astype(np.int32) for one in batch.samples]
    samples = [dataclasses.replace(one, token_ids=own) for one, own in zip(batch.samples, ids, strict=True)]
    return dataclasses.replace(batch, samples=samples)


@pytest.mark.parametrize(
    ("layout", "student", "teacher"),
    [
        pytest.param(Layout(tp=2), "student", "wider", id="wider"),
        pytest.param(Layout(ep=2, dp=2), "experts", "experts", marks=slow, id="experts"),
    ],
)
def test_padded_vocabularies_ids_never_sampled_and_experts_count_as_in_the_torch_learner(
    models: dict[str, str], layout: Layout, student: str, teacher: str
) -> None:
    never = (5, 60)
    steps = [clean(batch, never) for batch in batches(1)]
    taught = [Case(algorithm=opd(models[teacher], top_k=top_k), steps=steps, never=never) for top_k in (0, 59)]
    for case, ours in zip(taught, by_megatron(layout, Path(models[student]), taught), strict=True):
        assert max(gap(ours, by_torch(Path(models[student]), case)).values()) < TOLERANCE


@slow
def test_ranks_with_different_numbers_of_a_teachers_micro_batches_meet_in_its_collectives(
    models: dict[str, str],
) -> None:
    teachers = {ENV: models["experts"], OTHER: models["t1"]}  # the one speaks over all ranks, of which one is longer
    (batch,) = routed(batches(1))
    few = dataclasses.replace(batch, samples=[s for i, s in enumerate(batch.samples) if s.env_id == OTHER or i < 2])
    case = Case(algorithm=opd(teachers), steps=[few])
    (ours,) = by_megatron(Layout(ep=2, dp=2), Path(models["experts"]), [case])
    assert max(gap(ours, by_torch(Path(models["experts"]), case)).values()) < TOLERANCE


def test_samples_without_trained_tokens_teach_nothing(models: dict[str, str]) -> None:
    untrained = [Batch(version=0, samples=[sample([3, 4, 5], [0, 0, 0])])]
    kinds = [Case(algorithm=opd(models["t1"], level=level), steps=untrained) for level in ("reward", "loss")]
    for found in by_megatron(Layout(), Path(models["student"]), kinds):
        assert found.metrics[0]["trained_tokens"] == found.metrics[0]["grad_norm"] == 0


def refusals(layout: Layout, place: Place, models: dict[str, str]) -> list[tuple[str, str]]:
    found = []
    for number, (name, algorithm) in enumerate([("uneven", {}), ("gpt2", {}), ("t1", {"top_k": 62})]):
        case = Case(algorithm=opd(models[name], **algorithm))
        try:
            rank_learner(layout, place, number, Path(models["student"]), case)
        except RelaxGymError as error:
            found.append((type(error).__name__, str(error)))
        parallel.destroy()
    return found


def test_a_teacher_that_cannot_be_laid_out_so_is_named(models: dict[str, str]) -> None:
    for found in on_ranks(Layout(pp=2), refusals, models):
        (uneven, layers), (family, other), (many, top) = found
        assert [uneven, family, many] == [ConfigError.__name__, ModelError.__name__, ConfigError.__name__]
        assert models["uneven"] in layers
        assert "pp · vpp = 2 does not divide the 3 layers" in layers
        assert models["gpt2"] in other
        assert all("a teacher_engine runs it elsewhere" in text for text in (layers, other))
        assert "algorithm.top_k = 62 is more than the 61 tokens" in top


def apart(layout: Layout, place: Place, models: dict[str, str]) -> tuple[list[str], bool]:
    """A teacher's opinion of a micro-batch that has more of the policy in it, and refusals of an image."""
    case = Case(algorithm=opd(models["t1"], top_k=4))
    trainer = rank_learner(layout, place, 0, Path(models["student"]), case)
    distiller: Any = trainer.objectives[0].distiller
    part = trainer.backend.plan(random_batch().samples, skip_flat=False)
    plain = distiller.targets(part)
    marked = [
        dataclasses.replace(
            batch,
            experts=np.zeros((batch.ids.size, 2, 2), dtype=np.int32),
            positions=np.stack([batch.positions] * 3),
        )
        for batch in part.micro_batches
    ]
    other = distiller.targets(dataclasses.replace(part, micro_batches=marked))
    same = all(torch.equal(one.top, two.top) for one, two in zip(plain, other, strict=True))
    picture = Image(pixels=np.zeros((4, 4, 3), dtype=np.uint8))
    seen = dataclasses.replace(sample([3, 4, 5], [0, 0, 1]), media=(Placed(media=picture, start=0, end=1),))
    refused = []
    with pytest.raises(ModelError) as error:
        distiller.sampled([[seen]])
    refused.append(str(error.value))
    with pytest.raises(ModelError) as error:
        distiller.targets(dataclasses.replace(part, plan=dataclasses.replace(part.plan, used=(seen,))))
    refused.append(str(error.value))
    trainer.close()
    return refused, same


def test_a_teacher_reads_text_and_nothing_of_what_is_the_policys(models: dict[str, str]) -> None:
    ((refused, same),) = on_ranks(Layout(), apart, models)
    assert same
    for text in refused:
        assert "has image input" in text
        assert "its teacher reads text only" in text


# ---- engines -----------------------------------------------------------------------------------------------------


class Engine(Teacher):
    """Has random opinions about every sample, always the same; notes how often it is asked, and fails at last."""

    def __init__(self, *, fails_at: int = 1000) -> None:
        self.asked, self.fails_at, self.closed = 0, fails_at, False

    def score(self, samples: Any, *, temperature: float, top_k: int) -> list[TeacherScores]:
        self.asked += 1
        if self.asked >= self.fails_at:
            raise TrainingError("the machine of the teacher is gone")
        return [opinion(one, top_k) for one in samples]

    def close(self) -> None:
        self.closed = True


def opinion(one: Any, top_k: int) -> TeacherScores:
    generator = torch.Generator().manual_seed(int(one.token_ids.sum()))
    logits = torch.randn(one.trained_tokens, 61, generator=generator).log_softmax(-1)
    targets = torch.from_numpy(one.token_ids[one.loss_mask == 1].astype("int64"))
    sampled = logits.gather(-1, targets[:, None])[:, 0].numpy()
    if not top_k:
        return TeacherScores(logprobs=sampled)
    top, ids = logits.topk(top_k)
    return TeacherScores(logprobs=sampled, top_ids=ids.numpy(), top_logprobs=top.numpy())


KINDS: list[dict[str, Any]] = [{"top_k": 3}, {"level": "reward"}]


def with_engine(trainer: Any, make: Any) -> Any:
    """The learner with other teachers."""
    (objective,) = trainer.objectives
    trainer.objectives = [dataclasses.replace(objective, distiller=make(objective.algorithm.distillation))]
    return trainer


def asking(layout: Layout, place: Place, models: dict[str, str]) -> list[Any]:
    found = []
    for number, algorithm in enumerate(KINDS):
        engines: list[Engine] = []

        def build(engines: list[Engine] = engines) -> Engine:
            engines.append(Engine())
            return engines[0]

        trainer = engine_learner(layout, place, number, models, algorithm, build)
        found.append((outcome(trainer, Case(steps=batches(2))), [engine.asked for engine in engines]))
        trainer.close()
        assert all(engine.closed for engine in engines)
    return found


def engine_learner(
    layout: Layout, place: Place, number: int, models: dict[str, str], algorithm: dict[str, Any], build: Any
) -> RankLearner:
    case = Case(algorithm=opd(models["t1"], **algorithm))
    trainer = rank_learner(layout, place, number, Path(models["student"]), case)

    def make(distillation: Any) -> RankDistiller:
        shared = SharedEngine(build, "far away", trainer.backend.control)
        return RankDistiller(distillation, {models["t1"]: shared}, trainer.backend)

    return with_engine(trainer, make)


@pytest.mark.parametrize("layout", [Layout(dp=2), pytest.param(Layout(pp=2, cp=2), marks=slow)], ids=str)
def test_an_engine_is_asked_on_one_rank_for_all(models: dict[str, str], layout: Layout) -> None:
    ranks = on_ranks(layout, asking, models)
    for number, algorithm in enumerate(KINDS):
        run = context(Path(models["student"]), **opd(models["t1"], **algorithm))
        trainer = with_engine(
            learner(run, **OPTIONS), lambda d: Distiller(d, {models["t1"]: Engine()}, temperature=1.0)
        )
        expected = outcome(trainer, Case(steps=batches(2)))
        for rank, found in enumerate(ranks):
            ours, asked = found[number]
            assert max(gap(ours, expected).values()) < TOLERANCE
            times = 4 if algorithm.get("level") == "reward" else 2  # in two steps of two groups
            assert asked == ([times] if rank == 0 else [])


def failing(layout: Layout, place: Place, models: dict[str, str]) -> list[str]:
    """What each rank is told when the engine cannot be built, and when it fails in the second step."""
    group = parallel_group(layout, place)

    def build() -> Teacher:
        raise ModelError("no such engine")

    found = []
    for attempt in (lambda: SharedEngine(build, "far away", group), lambda: late(group)):
        try:
            attempt()
        except RelaxGymError as error:
            found.append(f"{type(error).__name__}: {error}")
    parallel.destroy()
    return found


def parallel_group(layout: Layout, place: Place) -> Any:
    parallel.initialise(layout, place.rank, place.init_method, "gloo")
    return dist.new_group(backend="gloo")


def late(group: Any) -> None:
    engine = SharedEngine(lambda: Engine(fails_at=2), "far away", group)
    for _ in range(2):
        assert len(engine.score(random_batch().samples, temperature=1.0, top_k=0)) == 6


def test_no_rank_waits_for_an_engine_that_fails(models: dict[str, str]) -> None:
    first, second = on_ranks(Layout(dp=2), failing, models)
    assert first == ["ModelError: no such engine", "TrainingError: the machine of the teacher is gone"]
    prefix = "TrainingError: the engine of teacher 'far away' failed on rank 0: "
    assert second == [prefix + "no such engine", prefix + "the machine of the teacher is gone"]


@slow
def test_a_run_whose_teacher_dies_ends_with_its_name(models: dict[str, str], tmp_path: Path) -> None:
    run = context(Path(models["student"]), **opd(models["t1"], top_k=3, teacher_engine={"name": "local"}))
    options = MegatronLearnerOptions(**OPTIONS, dp=2, timeout=100.0, start_timeout=200.0)
    trainer = MegatronLearner(dataclasses.replace(run, run_dir=tmp_path), options)
    assert trainer.step(random_batch())["opd_kl"] > 0
    for child in multiprocessing.active_children():
        if child.name.startswith("teacher"):
            child.kill()
    started = time.monotonic()
    with pytest.raises(TrainingError, match=r"teacher '.*t1': its process has ended with exit code -9"):
        trainer.step(random_batch(1, version=1))
    assert time.monotonic() - started < 30
