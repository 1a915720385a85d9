"""The Megatron learner trains the adapters that the torch learner trains with peft, however it is laid out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_cases import learner, random_batch, save_model, weights
from megatron_learner_kit import (
    MODELS,
    Case,
    Expected,
    Folders,
    Outcome,
    batches,
    by_megatron,
    by_torch,
    gap,
    on_ranks,
    rank_learner,
    without_times,
)
from pydantic import ValidationError
from safetensors.torch import load_file
from test_media_learner import sampled
from test_megatron_media import TWICE, compare, run_of
from transformers import AutoConfig

from relax_gym.errors import ConfigError, RunFolderError
from relax_gym_trainers.megatron_learner.checkpoint import FOLDER
from relax_gym_trainers.megatron_learner.checkpoint_export import export_checkpoint
from relax_gym_trainers.megatron_learner.checkpoint_files import INDEX
from relax_gym_trainers.megatron_learner.lora import adapt
from relax_gym_trainers.megatron_learner.optimizer import parts
from relax_gym_trainers.megatron_learner.options import MegatronLearnerOptions
from relax_gym_trainers.megatron_learner.parallel import Layout
from relax_gym_trainers.megatron_learner.rank_service import Place
from relax_gym_trainers.torch_learner.options import LoraOptions

pytest_plugins = ["megatron_fixtures"]
pytestmark = pytest.mark.usefixtures("one_thread")
TOLERANCE = 2e-5


def assert_same(found: Outcome, expected: Outcome) -> None:
    assert {name: value for name, value in gap(found, expected).items() if value > TOLERANCE} == {}


LORA = {"rank": 4, "alpha": 8.0}
KL = {"kl_coef": 0.1}
"""So that there is a reference, which the warm-up moves."""
FIVE = Case(algorithm=KL, options={"lora": LORA, "weight_decay": 0.1}, steps=batches(5), imitated=batches(1))
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("dense", Layout(tp=2)),
        pytest.param("dense", Layout(), marks=SLOW),
        pytest.param("dense", Layout(tp=2, sequence_parallel=False), marks=SLOW),
        pytest.param("dense", Layout(pp=2), marks=SLOW),
        pytest.param("dense", Layout(cp=2), marks=SLOW),
        pytest.param("dense", Layout(dp=2), marks=SLOW),
        pytest.param("deep", Layout(pp=2, vpp=2), marks=SLOW),
    ],
    ids=str,
)
def test_five_steps_are_those_of_the_torch_learner(
    expected: Expected, folders: Folders, model: str, layout: Layout
) -> None:
    (found,) = by_megatron(layout, folders[model], [FIVE])
    assert_same(found, expected(model, FIVE))


# Fused matrices of which a part is adapted; recomputation, which gives nothing a gradient if its input needs none.
PARTS = {
    targets: Case(options={"lora": {**LORA, "targets": targets}, "recompute": recompute}, steps=batches(2))
    for targets, recompute in {
        ("q_proj", "v_proj"): "full",
        ("k_proj", "up_proj"): "none",
        ("o_proj",): "none",
        ("gate_proj", "layers.1.mlp.down_proj"): "selective",
    }.items()
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(tp=2, sequence_parallel=False), Layout(tp=2)], ids=str)
def test_any_of_the_hubs_modules_can_be_adapted_alone(folders: Folders, layout: Layout) -> None:
    found = by_megatron(layout, folders["dense"], list(PARTS.values()))
    for (targets, case), outcome in zip(PARTS.items(), found, strict=True):
        options = {key: value for key, value in case.options.items() if key != "recompute"}
        theirs = by_torch(folders["dense"], dataclasses.replace(case, options=options))
        assert {name: value for name, value in gap(outcome, theirs).items() if value > TOLERANCE} == {}, targets
        before = weights(learner(case.context(folders["dense"])))
        moved = {name for name, value in outcome.weights.items() if not torch.equal(value, before[name])}
        assert moved == {name for name in before if name.removesuffix(".weight").endswith(targets)}


@pytest.mark.long
def test_all_linear_leaves_experts_out(folders: Folders) -> None:
    case = Case(options={"lora": LORA}, steps=batches(2))
    (found,) = by_megatron(Layout(tp=2, ep=2, etp=1), folders["experts"], [case])
    assert_same(found, by_torch(folders["experts"], case))


@pytest.mark.slow
def test_the_decoder_beside_encoders_can_be_adapted(tmp_path: Path) -> None:
    """Hugging Face's folders call its modules otherwise than the model does."""
    options = {"lora": LORA, "freeze_encoders": True}
    compare([Layout(tp=2)], run_of("qwen2_5_vl"), (sampled("qwen2_5_vl"),) * 2, tmp_path, **TWICE, **options)


# What it saves --------------------------------------------------------------------------------------------------------


def sizes(layout: Layout, place: Place, folder: Path) -> dict[str, Any]:
    """Numbers in the adapters of a rank, in its buffers of gradients, its optimizer and its reference."""
    trainer = rank_learner(layout, place, 0, folder, dataclasses.replace(FIVE, options={"lora": LORA}))
    frozen = {name: p.clone() for name, p in trainer.backend.chunks[0].named_parameters() if not p.requires_grad}
    trainer.step(random_batch())
    named = dict(trainer.backend.chunks[0].named_parameters())
    inner = [one.optimizer for one in parts(trainer.optimizer)]
    found = {
        "adapters": sum(p.numel() for name, p in named.items() if ".adapters." in name),
        "gradients": sum(sum(p.numel() for p in buffer.params) for buffer in trainer.backend.chunks[0].buffers),
        "moments": sum(state["exp_avg"].numel() for one in inner for state in one.state.values()),
        "reference": sum(value.numel() for value in trainer.backend.reference.values),
        "unchanged": all(torch.equal(named[name], value) for name, value in frozen.items()),
        "main_grad": [name for name in frozen if hasattr(named[name], "main_grad")],
    }
    trainer.close()
    return found


def test_only_adapters_have_gradients_moments_and_a_reference(folders: Folders) -> None:
    (found,) = on_ranks(Layout(), sizes, folders["dense"])
    layer = 4 * (4 * 32 + 32 + 16 + 16 + 32 + 2 * (32 + 48) + 48 + 32)
    assert found == {
        "adapters": 2 * layer,
        "gradients": 2 * layer,
        "moments": 2 * layer,
        "reference": 2 * layer,
        "unchanged": True,
        "main_grad": [],
    }


# Checkpoints ----------------------------------------------------------------------------------------------------------


def steps(trainer: Any, seeds: Sequence[int]) -> list[dict[str, float]]:
    return without_times([trainer.step(random_batch(seed, version=trainer.version)) for seed in seeds])


def saved(layout: Layout, place: Place, folder: Path, case: Case, out: Path) -> Any:
    """A warm-up, two steps, a checkpoint, and two more steps."""
    trainer = rank_learner(layout, place, 0, folder, case)
    trainer.imitate(random_batch(9), lr=1e-3)
    steps(trainer, range(2))
    before = weights(trainer)
    trainer.save_state(out)
    trainer.finish_save()
    trainer.export(out)
    after = steps(trainer, range(2, 4)), weights(trainer)
    trainer.close()
    return before, *after


def resumed(layout: Layout, place: Place, folder: Path, case: Case, out: Path) -> Any:
    trainer = rank_learner(layout, place, 1, folder, case)
    trainer.load(out)
    before = weights(trainer)
    after = steps(trainer, range(2, 4)), weights(trainer)
    trainer.close()
    return before, *after


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def both(layout: Layout, place: Place, *args: Any) -> Any:
    return saved(layout, place, *args), resumed(layout, place, *args)


ADAPTED = Case(algorithm=KL, options={"lora": LORA})


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=SLOW)])
def test_adapters_go_on_from_a_checkpoint_bit_for_bit(folders: Folders, tmp_path: Path, dtype: str) -> None:
    case = dataclasses.replace(ADAPTED, options={"lora": LORA, "dtype": dtype})
    for (before, metrics, after), again in on_ranks(Layout(tp=2), both, folders["dense"], case, tmp_path):
        assert same(before, again[0])
        assert metrics == again[1]
        assert same(after, again[2])
    names = {name for file in (tmp_path / FOLDER).glob("rank-*") for name in load_file(file) if "@" in name}
    assert names
    assert all(".adapters." in name for name in names)

    written = load_file(tmp_path / "model.safetensors")
    assert same(written, before)
    export_checkpoint(tmp_path, tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    close = {"atol": 1e-6, "rtol": 0} if dtype == "float32" else {"atol": 0.01, "rtol": 0}
    for name, value in written.items():  # one rank adds up in another order than two
        torch.testing.assert_close(exported[name], value, **close)


SOME = {**LORA, "targets": ("q_proj", "layers.2.mlp.gate_proj")}


@pytest.mark.parametrize("adapted", [SOME, pytest.param(LORA, marks=SLOW)], ids=["some layers", "all"])
def test_another_layout_takes_the_adapters_of_a_checkpoint(folders: Folders, tmp_path: Path, adapted: Any) -> None:
    case = dataclasses.replace(ADAPTED, options={"lora": adapted})
    before, metrics, _ = on_ranks(Layout(tp=2), saved, folders["deep"], case, tmp_path)[0]
    for layout in (Layout(), Layout(pp=2)):
        found = on_ranks(layout, resumed, folders["deep"], case, tmp_path)[0]
        for name, value in before.items():
            torch.testing.assert_close(found[0][name], value, atol=1e-6, rtol=0)
        assert found[1][-1]["loss"] == pytest.approx(metrics[-1]["loss"], abs=1e-5)


def refused(layout: Layout, place: Place, folder: Path, other: Path, out: Path) -> list[str]:
    saved(layout, place, folder, ADAPTED, out)
    larger = {"lora": {**LORA, "rank": 8}}
    found = []
    for number, (model, options) in enumerate([(folder, {}), (folder, larger), (other, ADAPTED.options)], 2):
        case = dataclasses.replace(ADAPTED, options=options)
        trainer = rank_learner(layout, place, number, model, case)
        with pytest.raises(RunFolderError) as error:
            trainer.load(out)
        found.append(str(error.value))
        trainer.close()
    return found


def test_adapters_of_something_else_are_refused(folders: Folders, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", MODELS["dense"], seed=1)
    ((plain, larger, moved),) = on_ranks(Layout(), refused, folders["dense"], other, tmp_path / "saved")
    assert plain.endswith("was trained with learner.lora")
    assert "was trained with learner.lora = {'rank': 4" in larger
    assert "holds adapters of another model than the one loaded" in moved
    index = tmp_path / "saved" / FOLDER / INDEX
    index.write_text(index.read_text().replace(str(folders["dense"]), str(tmp_path / "gone")))
    with pytest.raises(RunFolderError, match=r"holds adapters of the model in .*gone, which is not there; put it back"):
        export_checkpoint(tmp_path / "saved", tmp_path / "exported")


# What is refused ------------------------------------------------------------------------------------------------------


def test_dropout_is_refused() -> None:
    with pytest.raises(ValidationError, match=r'has no dropout, not 0\.1; learner\.name = "torch" has it'):
        MegatronLearnerOptions(lora={"dropout": 0.1})


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys")  # peft asks for them itself
@pytest.mark.parametrize(
    ("model", "layout", "targets", "message"),
    [
        ("experts", Layout(), ("q_proj", "up_proj"), "no linear is called up_proj; experts that are stacked"),
        ("deep", Layout(), ("lm_head",), r"adapts lm_head, but .* \(down_proj, gate_proj, k_proj, o_proj, q_proj"),
        ("dense", Layout(), ("nothing",), r"learner\.lora\.targets = \('nothing',\): Target modules"),
        ("deep", Layout(pp=2), ("layers.3.mlp.up_proj",), "adapts none of the layers 0 to 1, which are a chunk"),
    ],
)
def test_what_cannot_be_adapted_is_refused(
    folders: Folders, model: str, layout: Layout, targets: Any, message: str
) -> None:
    config = MODELS[model]
    with pytest.raises(ConfigError, match=message):
        adapt([], config, config, layout, LoraOptions(targets=targets), seed=0)


def test_encoders_are_refused_unless_they_are_frozen() -> None:
    whole = AutoConfig.from_pretrained(run_of("qwen2_5_vl").model_path)
    arguments = ([], whole.get_text_config(), whole, Layout(), LoraOptions())
    with pytest.raises(
        ConfigError, match=r"adapts model\.visual\..*leave encoders out with learner\.freeze_encoders = t"
    ):
        adapt(*arguments, seed=0)
    adapt(*arguments, seed=0, freeze_encoders=True)
