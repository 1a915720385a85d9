"""The Megatron learner with images, videos and audio: the steps of the torch learner, however it is laid out."""

from __future__ import annotations

import dataclasses
import functools
import pickle
import shutil
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
from learner_cases import SMALL, context, save_model
from megatron_learner_kit import OPTIONS, Outcome, gap, on_ranks
from safetensors.torch import load_file, save_file
from test_media_learner import sampled
from torch import Tensor
from transformers import AutoConfig, Qwen3Config

from relax_gym.config import RunConfig, load_config
from relax_gym.context import RunContext
from relax_gym.errors import ConfigError, ModelError, TrainingError
from relax_gym.lines import read_lines
from relax_gym.train import train
from relax_gym.types import Batch, TrainingSample
from relax_gym_plugins.samplers.local.model import ModelRunner
from relax_gym_trainers.megatron_learner import batches
from relax_gym_trainers.megatron_learner.families import FAMILIES, family_of
from relax_gym_trainers.megatron_learner.options import MegatronLearnerOptions
from relax_gym_trainers.megatron_learner.parallel import Layout
from relax_gym_trainers.megatron_learner.rank import RankLearner
from relax_gym_trainers.megatron_learner.rank_service import Place
from relax_gym_trainers.megatron_learner.towers import MediaReader, check_deep_stack
from relax_gym_trainers.torch_learner.learner import TorchLearner
from relax_gym_trainers.torch_learner.options import TorchLearnerOptions

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = ["qwen2_5_vl", "qwen3_vl", "qwen2_5_omni", "qwen3_omni"]
TOLERANCE = 1e-4  # log-probs differ by float32's last digits of numbers up to 10, all else by about 5e-6
NO_GRADIENT = "audio_tower.layers.0.self_attn.k_proj.bias"
"""A softmax is the same whatever is added to all of its inputs: what this is given is rounding."""

GRPO: dict[str, Any] = {"name": "grpo", "kl_coef": 0.1}


def run_of(name: str, algorithm: dict[str, Any] = GRPO, layers: int = 2) -> RunContext:
    """With heads for two tensor-parallel ranks."""
    folder = families.folder(name, groups=2, layers=layers)
    config = RunConfig.model_validate(
        {
            "model": {"name": str(folder)},
            "env": [{"id": "test/None-v0"}],
            "algorithm": algorithm,
            "train": {"steps": 2, "groups_per_step": 1, "group_size": 5},
        }
    )
    return RunContext(
        config=config,
        run_dir=folder,
        model_path=folder,
        tokenizer=families.renderer(name).tokenizer,
        processor=families.processor(name),
        never_sampled=tuple(families.renderer(name).never_sampled),
    )


Steps = tuple[tuple[TrainingSample, ...], ...]


def by_torch(run: RunContext, steps: Steps, folder: Path, **options: Any) -> Outcome:
    """The weights are those of the folder that it writes."""
    trainer = TorchLearner(run, TorchLearnerOptions(device="cpu", **{**OPTIONS, **options}))
    metrics = [trainer.step(Batch(version=number, samples=samples)) for number, samples in enumerate(steps)]
    trainer.export(folder)
    return Outcome(metrics, load_file(folder / "model.safetensors"))


def rank_learner(layout: Layout, place: Place, run: RunContext, **options: Any) -> RankLearner:
    sizes = {one.name: getattr(layout, one.name) for one in dataclasses.fields(layout)}
    return RankLearner(place, run, MegatronLearnerOptions(**{**OPTIONS, **options, **sizes}))


def stepped(layout: Layout, place: Place, run: RunContext, steps: Steps, options: dict[str, Any]) -> Outcome:
    trainer = rank_learner(layout, place, run, **options)
    metrics = [trainer.step(Batch(version=number, samples=samples)) for number, samples in enumerate(steps)]
    found = Outcome(metrics, {key: tensor.clone() for key, tensor in trainer.weights()})
    trainer.close()
    return found


def compare(layouts: list[Layout], run: RunContext, steps: Steps, folder: Path, **options: Any) -> Outcome:
    own = {key: options.pop(key) for key in ("recompute", "offload_reference") if key in options}
    expected = by_torch(run, steps, folder, **options)
    for layout in layouts:
        for found in on_ranks(layout, stepped, run, steps, {**options, **own}):
            assert found.weights.keys() == expected.weights.keys()
            found.weights.pop(NO_GRADIENT, None)
            theirs = {key: tensor for key, tensor in expected.weights.items() if key in found.weights}
            apart = gap(found, Outcome(expected.metrics, theirs))
            assert {key: value for key, value in apart.items() if value > TOLERANCE} == {}, layout
    return expected


# Steps ----------------------------------------------------------------------------------------------------------------

TWICE: dict[str, Any] = {"micro_batch_tokens": 300}


@pytest.mark.parametrize(("name", "layout"), [("qwen3_vl", Layout(tp=2)), ("qwen2_5_omni", Layout(dp=2))], ids=str)
def test_steps_are_those_of_the_torch_learner(name: str, layout: Layout, tmp_path: Path) -> None:
    """On images, videos and, with Omni, audio, next to a sample of text only."""
    compare([layout], run_of(name), (sampled(name),), tmp_path, **TWICE)


LAYOUTS = {
    "qwen3_vl": [
        Layout(),
        Layout(tp=2, sequence_parallel=False),
        Layout(pp=2),
        Layout(cp=2),
        Layout(dp=2),
        Layout(tp=2, pp=2),
        Layout(dp=2, cp=2),
    ],
    "qwen2_5_vl": [Layout(tp=2, sequence_parallel=False), Layout(pp=2), Layout(cp=2)],
    "qwen2_5_omni": [Layout(tp=2), Layout(pp=2), Layout(cp=2)],
    "qwen3_omni": [Layout(tp=2), Layout(pp=2), Layout(cp=2), Layout(dp=2, ep=2)],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_steps_of_every_family_and_layout_are_those_of_the_torch_learner(name: str, tmp_path: Path) -> None:
    compare(LAYOUTS[name], run_of(name), (sampled(name),), tmp_path, **TWICE)


MIXED = [
    Layout(dp=2),
    pytest.param(Layout(tp=2), marks=pytest.mark.slow),
    pytest.param(Layout(pp=2), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("layout", MIXED, ids=str)
def test_k48_k49_k70_what_has_text_only_goes_on_with_what_has_an_image(layout: Layout, tmp_path: Path) -> None:
    """Another rank or, where all have the same samples, another micro-batch; and a step of text only between two."""
    text, first, *_ = sampled("qwen3_vl")
    cut = batches.plan([text, first], ranks=layout.dp, budget=40, align=1, skip_flat=False)
    assert [[bool(one.media) for one in cut.micro_batches(rank)] for rank in range(layout.dp)] == (
        [[True], [False]] if layout.dp == 2 else [[True, False]]
    )
    compare([layout], run_of("qwen3_vl"), ((text, first), (text,), (text, first)), tmp_path, weight_decay=0.1)


def test_frozen_encoders_stay_as_they_are(tmp_path: Path) -> None:
    expected = compare([Layout(tp=2)], run_of("qwen3_vl"), (sampled("qwen3_vl"),), tmp_path, freeze_encoders=True)
    before = load_file(families.folder("qwen3_vl", groups=2) / "model.safetensors")
    moved = {key for key, tensor in expected.weights.items() if not torch.equal(tensor, before[key])}
    assert moved and not any("visual" in key for key in moved)


@pytest.mark.slow
def test_features_for_decoder_layers_are_right_when_these_are_computed_again(tmp_path: Path) -> None:
    compare([Layout(tp=2), Layout(cp=2)], run_of("qwen3_vl"), (sampled("qwen3_vl"),), tmp_path, recompute="full")


@pytest.mark.slow
def test_virtual_stages_see_media_as_one_model_does(tmp_path: Path) -> None:
    """For five steps: each rank of the pipeline has two chunks of one layer, and one of them the encoders."""
    run = run_of("qwen3_vl", layers=4)
    compare([Layout(pp=2, vpp=2)], run, (sampled("qwen3_vl"),) * 5, tmp_path, **TWICE)


# Teachers -------------------------------------------------------------------------------------------------------------


def taught(name: str, folder: Path, **algorithm: Any) -> dict[str, Any]:
    """By a model of the student's family with other weights."""
    source = families.folder(name, groups=2)
    shutil.copytree(source, folder)
    generator = torch.Generator().manual_seed(7)
    weights = {
        key: tensor + 0.5 * tensor.std(correction=0) * torch.randn(tensor.shape, generator=generator)
        for key, tensor in load_file(source / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return {"name": "opd", "teacher": str(folder), "rl_weight": 0.5, **algorithm}


SEEN = [
    pytest.param(Layout(tp=2), {"top_k": 4}, {}, id="tp2-top", marks=pytest.mark.slow),
    pytest.param(Layout(pp=2), {}, {}, id="pp2-whole"),
    pytest.param(Layout(tp=2), {"level": "reward"}, {}, id="tp2-reward", marks=pytest.mark.slow),
    pytest.param(Layout(cp=2), {}, {"offload_reference": True}, id="cp2-offloaded", marks=pytest.mark.slow),
    pytest.param(Layout(dp=2), {"level": "reward"}, {}, id="dp2-reward", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("layout", "level", "options"), SEEN)
def test_teachers_see_media_as_in_the_torch_learner(
    layout: Layout, level: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    algorithm = taught("qwen3_vl", tmp_path / "teacher", **level)
    steps = (sampled("qwen3_vl"),)
    expected = compare([layout], run_of("qwen3_vl", algorithm), steps, tmp_path, **TWICE, **options)
    assert level.get("level") == "reward" or expected.metrics[0]["opd_kl"] > 0.01


EXAMPLE = Path(__file__).parent.parent / "examples" / "tiny_image.toml"
SHORT = [
    "threads=1",
    "trackers=[]",
    "warmup.steps=2",
    "warmup.episodes_per_step=4",
    "train.steps=2",
    "train.groups_per_step=2",
    "train.group_size=3",
    "eval.every=0",
    "eval.episodes=2",
]


def lines(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """The metrics of a run."""
    train(load_config(EXAMPLE, [f"run_dir={folder}", *SHORT, *overrides]))
    return read_lines(folder / "metrics.jsonl")


@pytest.mark.slow
def test_a_run_on_pictures_is_that_of_the_torch_learner(tmp_path: Path) -> None:
    expected = lines(tmp_path / "torch")
    found = lines(tmp_path / "megatron", "learner.name=megatron", "learner.tp=2")
    own = ("time/", "perf/", "seconds", "padded_tokens", "prefix_saved_tokens")
    assert [set(line) for line in found] == [set(line) for line in expected]
    for ours, theirs in zip(found, expected, strict=True):
        compared = {name: value for name, value in theirs.items() if not any(part in name for part in own)}
        assert {name: ours[name] for name in compared} == pytest.approx(compared, rel=1e-3, abs=1e-5)


# Weights and state ----------------------------------------------------------------------------------------------------


def written(layout: Layout, place: Place, name: str, folder: Path) -> dict[str, Tensor]:
    trainer = rank_learner(layout, place, run_of(name))
    trainer.export(folder)
    trainer.close()
    return load_file(folder / "model.safetensors") if place.rank == 0 else {}


@pytest.mark.parametrize("name", NAMES)
def test_weights_come_back_under_their_names_bit_for_bit(name: str, tmp_path: Path) -> None:
    found = on_ranks(Layout(tp=2, pp=2) if name == "qwen3_vl" else Layout(), written, name, tmp_path)[0]
    expected = load_file(families.folder(name, groups=2) / "model.safetensors")
    assert found.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


def saved(layout: Layout, place: Place, name: str, folder: Path, load: bool) -> dict[str, Tensor]:
    """The weights after a first step, saved, or after a second, loaded between them."""
    trainer = rank_learner(layout, place, run_of(name))
    if load:
        trainer.load(folder)
    trainer.step(Batch(version=int(load), samples=sampled(name)))
    if not load:
        trainer.save_state(folder)
        trainer.finish_save()
    weights = {key: tensor.clone() for key, tensor in trainer.weights()}
    trainer.close()
    return weights


@pytest.mark.slow
def test_state_goes_on_in_another_layout(tmp_path: Path) -> None:
    name, (folder, exported) = "qwen3_vl", (tmp_path / "state", tmp_path / "torch")
    folder.mkdir()
    samples = sampled(name)
    on_ranks(Layout(tp=2), saved, name, folder, False)
    found = on_ranks(Layout(pp=2), saved, name, folder, True)[0]
    expected = by_torch(run_of(name), (samples, samples), exported).weights
    apart = {key: float((found[key] - value).abs().max() / value.abs().max()) for key, value in expected.items()}
    assert {key: value for key, value in apart.items() if value > TOLERANCE} == {}


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_omni"])
def test_samplers_know_the_names_of_checkpoints(name: str) -> None:
    """Where they are not those of the model's own parameters."""
    runner = ModelRunner(families.fresh_model(name), families.processor(name), max_rows=2, max_length=64)
    given = {key: tensor + 1 for key, tensor in load_file(families.folder(name) / "model.safetensors").items()}
    runner.load_weights(given)
    before = dict(families.model(name).named_parameters())
    for key, parameter in runner.model.named_parameters():
        torch.testing.assert_close(parameter, before[key] + 1, atol=0, rtol=0)


def test_positions_axes_are_those_of_transformers() -> None:
    sections = [24, 20, 20]
    for model_type, interleaved in (("qwen2_5_vl_text", False), ("qwen3_vl_text", True)):
        config = Qwen3Config(head_dim=128)
        config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
        axes = FAMILIES[model_type].axes(config)
        assert axes is not None and np.bincount(axes).tolist() == sections
        assert axes[:4].tolist() == ([0, 1, 2, 0] if interleaved else [0, 0, 0, 0])


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_omni"])
def test_k53_each_sample_of_a_pack_has_the_positions_that_it_has_alone(name: str) -> None:
    """Padded to a multiple of 8, and in a micro-batch with others, one of them without media."""
    processor, model = families.processor(name), families.model(name)
    reader = MediaReader(processor, model.config)
    (whole,) = batches.plan(sampled(name), ranks=1, budget=10_000, align=8).micro_batches(0)
    laid_out = reader.laid_out(whole)
    assert laid_out.positions.shape == (3, len(whole.ids))
    for start, sample in zip(whole.cu_seqlens, whole.members, strict=False):
        media = [placed.media for placed in sample.media]
        alone = np.broadcast_to(processor.positions(model, sample.token_ids, media), (3, len(sample.token_ids)))
        read = int(sample.loss_mask.nonzero()[0][-1])  # what follows the last predictor is left out
        np.testing.assert_array_equal(laid_out.positions[:, start : start + read], alone[:, :read])


def test_ranks_in_other_processes_are_given_the_processor() -> None:
    processor = families.processor("qwen3_vl")
    media = sampled("qwen3_vl")[1].media[0].media
    other = pickle.loads(pickle.dumps(processor))
    assert torch.equal(other.features(media).tensors["pixel_values"], processor.features(media).tensors["pixel_values"])


def test_features_are_the_same_where_arithmetic_is_less_precise() -> None:
    processor = families.processor("qwen3_omni")
    other = pickle.loads(pickle.dumps(processor))
    for media in {placed.media for sample in sampled("qwen3_omni") for placed in sample.media}:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = other.features(media).tensors
        for name, tensor in processor.features(media).tensors.items():
            assert torch.equal(found[name], tensor)


# What is refused ------------------------------------------------------------------------------------------------------


def refusal(layout: Layout, place: Place, run: RunContext, samples: Any, options: dict[str, Any]) -> str:
    try:
        rank_learner(layout, place, run, **options).step(Batch(version=0, samples=samples))
    except (ConfigError, ModelError, TrainingError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused(run: RunContext, samples: Any = (), **options: Any) -> str:
    return str(on_ranks(Layout(), refusal, run, samples, options)[0])


def test_k40_placeholders_without_media_and_media_without_a_reader_are_refused() -> None:
    run, sample = run_of("qwen3_vl"), sampled("qwen3_vl")[1]
    found = refused(run, [dataclasses.replace(sample, media=())])
    assert found.startswith("TrainingError: samples have ") and "but their media stand for 0" in found
    found = refused(dataclasses.replace(run, processor=None), [sample])
    assert found.startswith("TrainingError: the model reads text only, but samples have <")


def test_models_without_encoders_have_none_to_freeze(tmp_path: Path) -> None:
    text = context(save_model(tmp_path, Qwen3Config(**SMALL)))
    assert refused(text, freeze_encoders=True) == (
        "ConfigError: learner.freeze_encoders = true, but qwen3 models have no encoder of images, video or audio"
    )


def test_k38_families_that_are_not_supported_are_refused() -> None:
    assert "use the torch learner" in refused(run_of("smolvlm"))
    with pytest.raises(ModelError, match=r"mrope_section = None.*qwen3_vl_text models only with any"):
        config = AutoConfig.from_pretrained(families.folder("qwen3_vl")).get_text_config()
        config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
        family_of(config)


@functools.cache
def deep() -> Any:
    return AutoConfig.from_pretrained(families.folder("qwen3_vl"))


def test_a_pipeline_must_not_cut_the_layers_that_are_given_features() -> None:
    assert check_deep_stack(deep(), 1) == 1
    with pytest.raises(
        ConfigError, match=r"to their first 1 layers, but the first pipeline stage has 0; lower learner\.pp"
    ):
        check_deep_stack(deep(), 0)
