"""The teacher engine `local`: scores of a process of its own, and what is said when that fails."""

import dataclasses
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from distillation_kit import ENV, GPT2, routed
from learner_cases import context, learner, qwen3, random_batch, sample, save_model, weights, without_seconds

from relax_gym.config import MediaConfig, ModelConfig, parse_config
from relax_gym.errors import ConfigError, ModelError, TrainingError
from relax_gym.lines import read_lines
from relax_gym.models import resolve_model
from relax_gym.teacher import checked_scores
from relax_gym.train import train
from relax_gym.types import Batch
from relax_gym_trainers.torch_learner.distillation import Distiller
from relax_gym_trainers.torch_learner.local_teacher import LocalTeacher
from relax_gym_trainers.torch_learner.options import LocalTeacherOptions
from relax_gym_trainers.torch_learner.teacher import TeacherSettings, load_teacher

OPTIONS = LocalTeacherOptions(dtype="float32", device="cpu", threads=1, timeout=120)
OTHER = "test/Other-v0"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A student and two teachers, folders of the same vocabulary."""
    root = tmp_path_factory.mktemp("models")
    made = {name: save_model(root / name, GPT2, seed) for name, seed in [("student", 0), ("t1", 1), ("t2", 2)]}
    for folder in made.values():
        context(folder).tokenizer.save_pretrained(folder)
    return made


def start(models, options=OPTIONS, model=None):
    return LocalTeacher(context(models["student"], temperature=0.7), options, str(model or models["t1"]))


@pytest.fixture(scope="module")
def engine(models):
    teacher = start(models)
    yield teacher
    teacher.close()


def frozen(models, name, dtype=torch.float32):
    settings = TeacherSettings(
        temperature=0.7,
        device=torch.device("cpu"),
        dtype=dtype,
        chunk=1024,
        budget=4096,
        share_prefix=True,
        trust_remote_code=False,
        media=MediaConfig(),
    )
    return load_teacher(models[name], tokenizer=context(models[name]).tokenizer, rows=61, settings=settings)


def test_a_teacher_in_bfloat16_keeps_float32_rotary_frequencies(tmp_path):
    folder = save_model(tmp_path, qwen3())
    context(folder).tokenizer.save_pretrained(folder)
    exact, rounded = (frozen({"qwen": folder}, "qwen", d).policy.model for d in (torch.float32, torch.bfloat16))
    assert {parameter.dtype for parameter in rounded.parameters()} == {torch.bfloat16}
    assert rounded.lm_head.weight is rounded.model.embed_tokens.weight
    assert torch.equal(rounded.model.rotary_emb.inv_freq, exact.model.rotary_emb.inv_freq)


@pytest.mark.parametrize("top_k", [0, 5])
def test_the_engine_scores_as_the_frozen_model_does(models, engine, top_k):
    samples = [*random_batch(groups=3).samples, sample([3, 4, 5], [0, 0, 0])]
    routes = np.zeros((2, 1, 1), dtype=np.int32)
    asked = [*samples[:-1], dataclasses.replace(samples[-1], routed_experts=routes)]
    there = checked_scores(engine, asked, temperature=0.7, top_k=top_k)
    here = checked_scores(frozen(models, "t1"), samples, temperature=0.7, top_k=top_k)
    for a, b in zip(there, here, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-6)
        assert (a.top_ids is None) == (top_k == 0)
        if top_k:
            assert (a.top_ids == b.top_ids).all()
            np.testing.assert_allclose(a.top_logprobs, b.top_logprobs, rtol=0, atol=1e-6)


def test_what_it_raises_ends_the_run_with_the_reason_and_it_goes_on(engine):
    samples = random_batch().samples
    with pytest.raises(
        TrainingError, match=r"teacher '.*t1': this teacher scores at temperature 0\.7, not at 1"
    ) as caught:
        engine.score(samples, temperature=1.0, top_k=0)
    assert "local_teacher.py" in caught.value.__notes__[0]
    with pytest.raises(TrainingError, match=r"teacher '.*t1': RuntimeError: selected index k out of range"):
        engine.score(samples, temperature=0.7, top_k=100)
    assert len(engine.score(samples, temperature=0.7, top_k=0)) == len(samples)


@pytest.mark.parametrize("algorithm", [{"top_k": 3}, {"level": "reward"}])
def test_one_of_two_teachers_may_be_on_the_engine(models, engine, algorithm, one_thread):  # as the engine has
    teachers = {ENV: str(models["t1"]), OTHER: str(models["t2"])}
    run = context(models["student"], temperature=0.7, name="opd", teachers=teachers, **algorithm)
    here, there = learner(run), learner(run)
    mixed = {str(models["t1"]): engine, str(models["t2"]): frozen(models, "t2")}
    objective = there.objectives[0]
    distiller = Distiller(objective.algorithm.distillation, mixed, temperature=0.7)
    there.objectives = [dataclasses.replace(objective, distiller=distiller)]
    batch = Batch(version=0, samples=routed(random_batch(groups=3).samples))
    expected = without_seconds(here.step(batch))
    assert expected["grad_norm"] > 0
    assert without_seconds(there.step(batch)) == pytest.approx(expected, abs=1e-6)
    assert all(torch.allclose(value, weights(there)[name], atol=1e-6) for name, value in weights(here).items())


def test_a_killed_process_is_noticed_at_once_and_closing_twice_is_nothing(models):
    teacher = start(models)
    process = teacher._process
    os.kill(process.pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(
        TrainingError, match=r"teacher '.*t1': its process has ended with exit code -9; its output above"
    ):
        teacher.score(random_batch().samples, temperature=0.7, top_k=0)
    assert time.monotonic() - started < 5
    teacher.close()
    teacher.close()
    assert process not in multiprocessing.active_children()
    with pytest.raises(TrainingError, match=r"teacher '.*t1' is closed"):
        teacher.score(random_batch().samples, temperature=0.7, top_k=0)


def test_a_process_that_does_not_answer_is_ended_at_the_deadline(models):
    teacher = start(models)
    os.kill(teacher._process.pid, signal.SIGSTOP)
    teacher._timeout = 0.5
    many = random_batch(groups=200).samples  # more than the connection holds: sending blocks too
    with pytest.raises(
        TrainingError, match=r"no answer within 0\.5 s, so its process was ended; give a larger teacher_"
    ):
        teacher.score(many, temperature=0.7, top_k=0)
    teacher._process.join(5)
    assert teacher._process.exitcode == -9
    teacher.close()


@pytest.mark.slow
def test_a_forgotten_engine_ends_its_process(models):
    process = start(models)._process
    process.join(5)
    assert process.exitcode == -9


def test_a_model_that_cannot_be_loaded_is_named(models, tmp_path):
    with pytest.raises(ModelError, match="nowhere does not exist"):
        start(models, model=tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"teacher_engine\.device = 'quantum' is no torch device"):
        start(models, LocalTeacherOptions(device="quantum"))
    broken = save_model(tmp_path / "broken", GPT2, 1)
    tokenizer = context(broken).tokenizer
    tokenizer.add_tokens(["new"])
    tokenizer.save_pretrained(broken)
    with pytest.raises(
        ModelError, match=rf"cannot start teacher '{re.escape(str(broken))}': teacher .* has another tok"
    ):
        start(models, model=broken)
    assert [child for child in multiprocessing.active_children() if "broken" in child.name] == []


@pytest.mark.parametrize("algorithm", [{"top_k": 4}, {"level": "reward"}])
def test_a_run_with_the_engine_has_the_losses_of_the_frozen_model(tmp_path, algorithm):
    tiny = {"hidden_size": 64, "num_layers": 2}
    teacher = str(resolve_model(ModelConfig(name="tiny-qwen3", kwargs={**tiny, "seed": 1})))

    def losses(name, **more):
        config = {
            "run_dir": str(tmp_path / name),
            "threads": 1,
            "trackers": [],
            "model": {"name": "tiny-qwen3", "kwargs": {**tiny, "seed": 0}},
            "env": [{"id": "relax_gym/GuessNumber-v0", "kwargs": {"style": "terse"}}],
            "rollout": {"max_turns": 2, "max_new_tokens": 4},
            "sampler": {"name": "local", "dtype": "float32"},
            "learner": {"name": "torch", "lr": 2e-3, "dtype": "float32"},
            "algorithm": {"name": "opd", "teacher": teacher, **algorithm, **more},
            "train": {"steps": 3, "groups_per_step": 2, "group_size": 2},
        }
        train(parse_config(config))
        lines = [line for line in read_lines(tmp_path / name / "metrics.jsonl") if "learner/loss" in line]
        return [(line["learner/loss"], line["learner/opd_kl"], line["learner/grad_norm"]) for line in lines]

    expected = losses("frozen")
    assert len(expected) == 3
    got = losses("engine", teacher_engine={"name": "local", "dtype": "float32"})
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)
    assert [child for child in multiprocessing.active_children() if teacher in child.name] == []


SCRIPT = """
import sys, time
from pathlib import Path
from learner_cases import context
from relax_gym_trainers.torch_learner.local_teacher import LocalTeacher
from relax_gym_trainers.torch_learner.options import LocalTeacherOptions

if __name__ == "__main__":
    teacher = LocalTeacher(context(Path(sys.argv[1])), LocalTeacherOptions(device="cpu"), sys.argv[2])
    print(teacher._process.pid, flush=True)
    time.sleep(100)
"""


@pytest.mark.slow
def test_the_process_ends_with_a_killed_parent(models, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join(sys.path)
    command = [sys.executable, str(script), str(models["student"]), str(models["t1"])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}) as parent:
        pid = int(parent.stdout.readline())
        assert os.getpgid(pid) == pid  # a signal for all of the parent's group is not for it
        parent.kill()
    for _ in range(50):
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.1)
    pytest.fail("the teacher's process outlived its parent by 5 s")
