"""Folders of whole Omni models: their thinker is trained, and what is written is such a folder again."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import families
import pytest
import torch
import transformers
from megatron_learner_kit import OPTIONS, Outcome, on_ranks
from safetensors.torch import load_file, save_file
from test_media_learner import sampled
from test_megatron_media import TWICE, rank_learner, run_of, stepped
from torch import Tensor

from relax_gym.context import RunContext
from relax_gym.errors import RunFolderError
from relax_gym.models import load_language_model
from relax_gym.types import Batch
from relax_gym_plugins.samplers.local.model import ModelRunner
from relax_gym_trainers.megatron_learner.checkpoint_export import export_checkpoint
from relax_gym_trainers.megatron_learner.parallel import Layout
from relax_gym_trainers.megatron_learner.rank_service import Place
from relax_gym_trainers.torch_learner.learner import TorchLearner
from relax_gym_trainers.torch_learner.options import LoraOptions, TorchLearnerOptions

pytestmark = pytest.mark.usefixtures("one_thread")
CLASSES = {
    "qwen2_5_omni": transformers.Qwen2_5OmniForConditionalGeneration,
    "qwen3_omni": transformers.Qwen3OmniMoeForConditionalGeneration,
}
SLOW_QWEN3 = pytest.param("qwen3_omni", marks=pytest.mark.slow)


@functools.cache
def whole_folder(name: str) -> Path:
    """The family's thinker with what stands for the other parts, built once in a process and removed at its end."""
    thinker, path = families.folder(name, groups=2), Path(tempfile.mkdtemp(prefix=f"relax-gym-whole-{name}-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    shutil.copytree(thinker, path, dirs_exist_ok=True)
    tensors = under_thinker(load_file(thinker / "model.safetensors"))
    tensors["talker.codec_head.weight"] = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
    tensors["token2wav.steps"] = torch.arange(5)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((thinker / "config.json").read_text(encoding="utf-8"))
    kind = config["model_type"].removesuffix("_thinker")
    whole = {"model_type": kind, "enable_audio_output": False, "dtype": "float32", "thinker_config": config}
    (path / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    torch.save({}, path / "spk_dict.pt")
    return path


def whole_run(name: str, folder: Path | None = None) -> RunContext:
    return dataclasses.replace(run_of(name), model_path=folder or whole_folder(name))


def torch_learner(run: RunContext, **options: Any) -> TorchLearner:
    return TorchLearner(run, TorchLearnerOptions(device="cpu", **{**OPTIONS, **TWICE, **options}))


def plain(outcome: Outcome) -> list[dict[str, float]]:
    return [{key: value for key, value in step.items() if key != "seconds"} for step in outcome.metrics]


def under_thinker(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"thinker.{key}": tensor for key, tensor in weights.items()}


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [key for key, tensor in expected.items() if not torch.equal(found[key], tensor)]


# Steps ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2_5_omni", SLOW_QWEN3])
def test_the_torch_learner_trains_the_thinker(name: str, tmp_path: Path) -> None:
    found = []
    for run in (run_of(name), whole_run(name)):
        trainer = torch_learner(run)
        metrics = [trainer.step(Batch(version=0, samples=sampled(name)))]
        trainer.export(tmp_path / str(len(found)))
        weights = load_file(tmp_path / str(len(found)) / "model.safetensors")
        found.append(Outcome(metrics, {key: tensor for key, tensor in weights.items() if "tal" not in key[:3]}))
    alone, whole = found
    assert plain(whole) == plain(alone)
    thinker = {key: tensor for key, tensor in whole.weights.items() if key.startswith("thinker.")}
    assert differing(thinker, under_thinker(alone.weights)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), [("qwen2_5_omni", Layout(tp=2)), ("qwen3_omni", Layout())], ids=str)
def test_the_megatron_learner_trains_the_thinker(name: str, layout: Layout) -> None:
    alone, whole = (on_ranks(layout, stepped, run, (sampled(name),), TWICE) for run in (run_of(name), whole_run(name)))
    for ours, theirs in zip(whole, alone, strict=True):
        assert plain(ours) == plain(theirs)
        assert differing(ours.weights, under_thinker(theirs.weights)) == []


# Folders --------------------------------------------------------------------------------------------------------------


def check_folder(folder: Path, name: str) -> dict[str, Tensor]:
    """It is a whole model, for `transformers` too; its thinker's weights."""
    source, found = whole_folder(name), load_file(folder / "model.safetensors")
    before = load_file(source / "model.safetensors")
    thinker = {key: tensor for key, tensor in found.items() if key.startswith("thinker.")}
    others = {key: tensor for key, tensor in before.items() if key not in thinker}
    assert differing(found, thinker | others) == [] and found.keys() == before.keys() and len(others) == 2
    assert (folder / "spk_dict.pt").read_bytes() == (source / "spk_dict.pt").read_bytes()
    loaded, whole = load_language_model(folder, dtype=torch.float32), CLASSES[name].from_pretrained(folder)
    assert differing(dict(whole.thinker.named_parameters()), dict(loaded.named_parameters())) == []
    return thinker


def given_to_a_sampler(name: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a whole folder's sampler once it has been given these."""
    model = load_language_model(whole_folder(name), dtype=torch.float32).eval()
    runner = ModelRunner(model, families.processor(name), max_rows=2, max_length=64)
    runner.load_weights(weights)
    return {key: tensor.detach().clone() for key, tensor in runner.model.named_parameters()}


ADAPTED = {"lora": LoraOptions(rank=2, targets=("q_proj", "v_proj"))}
TRAINED = [
    pytest.param("qwen3_omni", {}, id="qwen3"),
    pytest.param("qwen3_omni", ADAPTED, id="qwen3-lora", marks=pytest.mark.slow),
    pytest.param("qwen2_5_omni", {}, id="qwen2.5", marks=pytest.mark.slow),
    pytest.param("qwen2_5_omni", ADAPTED, id="qwen2.5-lora", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "options"), TRAINED)
def test_folders_and_published_weights_of_the_torch_learner_are_those_of_whole_models(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    trainer = torch_learner(whole_run(name), **options)
    trainer.step(Batch(version=0, samples=sampled(name)))
    weights = {key: tensor.clone() for key, tensor in trainer.weights()}
    trainer.export(tmp_path / "out")
    thinker = check_folder(tmp_path / "out", name)
    stacked = {key for key in weights if ".mlp.experts." in key}
    assert weights.keys() - stacked == {key for key in thinker if ".mlp.experts." not in key}
    assert differing(given_to_a_sampler(name, weights), given_to_a_sampler(name, thinker)) == []
    again = torch_learner(whole_run(name, tmp_path / "out"))
    assert differing(dict(again.weights()), weights) == []


def written(layout: Layout, place: Place, name: str, folder: Path) -> dict[str, Tensor]:
    """The published weights after a step; a model folder and a checkpoint have them, too."""
    trainer = rank_learner(layout, place, whole_run(name), **TWICE)
    trainer.step(Batch(version=0, samples=sampled(name)))
    trainer.export(folder / "out")
    trainer.save_state(folder)
    trainer.finish_save()
    weights = {key: tensor.clone() for key, tensor in trainer.weights()}
    trainer.close()
    return weights


WRITTEN = [("qwen2_5_omni", Layout()), pytest.param("qwen3_omni", Layout(tp=2), marks=pytest.mark.slow)]


@pytest.mark.parametrize(("name", "layout"), WRITTEN, ids=str)
def test_folders_and_published_weights_of_the_megatron_learner_are_those_of_whole_models(
    name: str, layout: Layout, tmp_path: Path
) -> None:
    weights = on_ranks(layout, written, name, tmp_path)[0]
    assert differing(check_folder(tmp_path / "out", name), weights) == []
    given_to_a_sampler(name, weights)
    export_checkpoint(tmp_path, tmp_path / "later")
    assert differing(check_folder(tmp_path / "later", name), weights) == []


def test_the_other_parts_of_a_checkpoint_must_be_where_they_were(tmp_path: Path) -> None:
    source = shutil.copytree(whole_folder("qwen2_5_omni"), tmp_path / "model")
    on_ranks(Layout(), saved, source, tmp_path)
    shutil.rmtree(source)
    with pytest.raises(RunFolderError, match=r"part of the model in .*/model, which is not there; put it back"):
        export_checkpoint(tmp_path, tmp_path / "out")


def saved(layout: Layout, place: Place, source: Path, folder: Path) -> None:
    trainer = rank_learner(layout, place, whole_run("qwen2_5_omni", source))
    trainer.save_state(folder)
    trainer.finish_save()
    trainer.close()
