"""`relax-gym export`: a model folder of any checkpoint."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from learner_cases import context, qwen3, random_batch, save_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from relax_gym.config import dump_config, parse_config
from relax_gym_trainers.megatron_learner.learner import MegatronLearner
from relax_gym_trainers.megatron_learner.options import MegatronLearnerOptions
from relax_gym_trainers.torch_learner.learner import TorchLearner
from relax_gym_trainers.torch_learner.options import TorchLearnerOptions


def write_config(run_dir: Path, learner: str) -> None:
    config = {
        "learner": {"name": learner},
        "model": {"name": "tiny-qwen3"},
        "env": [{"id": "relax_gym/GuessNumber-v0"}],
        "train": {"steps": 9, "groups_per_step": 2, "group_size": 2},
    }
    (run_dir / "config.toml").write_text(dump_config(parse_config(config)))


def checkpoint(run_dir: Path, learner: Any, name: str, model: Path, step: int) -> Path:
    """What a run leaves."""
    folder = run_dir / "checkpoints" / f"step-{step:06d}"
    folder.mkdir(parents=True)
    write_config(run_dir, name)
    context(model).tokenizer.save_pretrained(folder)
    if learner.exports_checkpoints:
        learner.export(folder)
    finish = learner.save_state(folder)
    if finish:
        finish()
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), qwen3())


def test_a_checkpoint_that_is_a_model_is_copied_without_the_learners_state(
    capsys: Any, model: Path, tmp_path: Path
) -> None:
    learner = TorchLearner(context(model), TorchLearnerOptions(dtype="float32", device="cpu"))
    for step in (1, 2):
        learner.step(random_batch(version=step - 1))
        folder = checkpoint(tmp_path / "run", learner, "torch", model, step)
        (folder / "slots.json").write_text("{}")
    code, out, _ = run(capsys, "export", tmp_path / "run", tmp_path / "out")
    assert (code, out) == (0, f"{tmp_path}/out: a copy of the model in {folder}, which is a model folder already\n")
    assert not {"learner_state.pt", "slots.json"} & {file.name for file in (tmp_path / "out").iterdir()}
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(exported[name], tensor) for name, tensor in learner.weights())
    code, out, _ = run(capsys, "export", tmp_path / "run", tmp_path / "first", "--checkpoint", "1")
    assert code == 0
    assert (tmp_path / "first" / "config.json").is_file()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_without_a_model_is_made_one(
    dtype: Any, capsys: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    options = MegatronLearnerOptions(dtype=dtype, lr=1e-2, checkpoint_model=False)
    with closing(MegatronLearner(context(model), options)) as learner:
        learner.step(random_batch())
        wanted = {name: tensor.clone() for name, tensor in learner.weights()}
        folder = checkpoint(tmp_path / "run", learner, "megatron", model, 3)
    code, _, err = run(capsys, "eval", tmp_path / "run")
    assert code == 1
    assert f"{folder} holds no model, only the learner's state; make one with `relax-gym export {folder} OUT`" in err
    code, out, err = run(capsys, "export", folder, tmp_path / "out")
    assert (code, out) == (0, f"{tmp_path}/out: the model of {folder}\n"), err
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(found[name].dtype == getattr(torch, dtype) for name in found)
    assert all(torch.equal(found[name], wanted[name]) for name in found)
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("removed_at", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_checkpoint_that_its_run_removes_meanwhile_is_not_exported_in_part(
    removed_at: str, capsys: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, copy = tmp_path / "step-000001", shutil.copyfile
    shutil.copytree(model, folder)
    context(model).tokenizer.save_pretrained(folder)

    def copy_and_remove(source: Path, target: Path) -> None:
        copy(source, target)
        if source.name == removed_at:
            shutil.rmtree(folder)

    monkeypatch.setattr(shutil, "copyfile", copy_and_remove)
    code, _, err = run(capsys, "export", folder, tmp_path / "out")
    assert code == 1
    assert f"{folder} has been removed meanwhile: its run keeps only its newest checkpoints" in err
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_exported_is_said(capsys: Any, model: Path, tmp_path: Path) -> None:
    def refused(*arguments: object) -> str:
        code, _, err = run(capsys, "export", *arguments)
        assert code == 1
        assert not any(path.name.endswith(".partial") for path in tmp_path.iterdir())
        return str(err)

    out = tmp_path / "out"
    assert "is no folder; give that of a run, or of one of its checkpoints" in refused(tmp_path / "nowhere", out)
    assert "is no run folder; leave out --checkpoint" in refused(model, out, "--checkpoint", 3)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    assert "has no checkpoint; it has: none" in refused(tmp_path / "run", out)
    (tmp_path / "run" / "checkpoints" / "step-000004").mkdir(parents=True)
    assert "has no checkpoint of step 3; it has: 4" in refused(tmp_path / "run", out, "--checkpoint", 3)
    (tmp_path / "empty").mkdir()
    assert "is in no run folder whose config says which learner wrote it" in refused(tmp_path / "empty", out)
    for learner, message in (("torch", "TorchLearner cannot make one of it"), ("megatron", "has no megatron_state/")):
        folder = tmp_path / learner / "checkpoints" / "step-000001"
        folder.mkdir(parents=True)
        write_config(tmp_path / learner, learner)
        assert message in refused(folder, out)
    out.mkdir()
    (out / "x").touch()
    assert "exists already; choose another, or delete it" in refused(model, out)
