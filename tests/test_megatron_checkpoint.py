"""The state of the Megatron learner's ranks: on the disk and back, in the same layout and in any other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_cases import random_batch, save_model, weights
from megatron_learner_kit import EXPERTS, TINY, Case, on_ranks, rank_learner, without_times
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3MoeConfig

from relax_gym.errors import RunFolderError, TrainingError
from relax_gym_trainers.megatron_learner.checkpoint import FOLDER, random_states
from relax_gym_trainers.megatron_learner.checkpoint_files import (
    INDEX,
    Region,
    Stored,
    Writing,
    table,
    write_index,
)
from relax_gym_trainers.megatron_learner.parallel import Layout
from relax_gym_trainers.megatron_learner.rank_service import Place
from relax_gym_trainers.tensor_files import write_tensors

LAYERS = {**TINY, "num_hidden_layers": 4}
KL = {"kl_coef": 0.1}
"""So that the state has a reference, which the warm-up moves."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("dense"), Qwen3Config(**LAYERS, tie_word_embeddings=True))


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("experts"), Qwen3MoeConfig(**TINY, **EXPERTS))


def steps(trainer: Any, seeds: Sequence[int]) -> list[dict[str, float]]:
    return without_times([trainer.step(random_batch(seed, version=trainer.version)) for seed in seeds])


# Each process of these gives (weights at the checkpoint, metrics after it, weights at the end) ----------------------

Found = tuple[dict[str, Tensor], list[dict[str, float]], dict[str, Tensor]]


def saved(layout: Layout, place: Place, folder: Path, options: dict[str, Any], out: Path) -> Found:
    """Two steps, a checkpoint, and two more while it is written."""
    trainer = rank_learner(layout, place, 0, folder, Case(algorithm=KL, options=options))
    trainer.imitate(random_batch(9), lr=1e-3)
    steps(trainer, range(2))
    before = weights(trainer)
    trainer.save_state(out)
    metrics = steps(trainer, range(2, 4))
    trainer.finish_save()
    after = weights(trainer)
    trainer.close()
    return before, metrics, after


def resumed(layout: Layout, place: Place, folder: Path, options: dict[str, Any], out: Path) -> Found:
    torch.manual_seed(77)
    trainer = rank_learner(layout, place, 1, folder, Case(algorithm=KL, options=options))
    trainer.load(out)
    assert trainer.version == 2
    before = weights(trainer)
    metrics = steps(trainer, range(2, 4))
    after = weights(trainer)
    trainer.close()
    return before, metrics, after


def both(layout: Layout, place: Place, folder: Path, options: dict[str, Any], out: Path) -> tuple[Found, Found]:
    return saved(layout, place, folder, options, out), resumed(layout, place, folder, options, out)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def far(one: Found, other: Found) -> float:
    metrics = max(
        abs(a[name] - b[name]) / max(abs(a[name]), 0.01)
        for a, b in zip(one[1], other[1], strict=True)
        for name in ("loss", "grad_norm", "kl")
    )
    return max(metrics, *((one[2][name] - other[2][name]).abs().max().item() for name in one[2]))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (Layout(dp=2), {"dtype": "bfloat16"}),
        (Layout(), {"distributed_optimizer": False}),
        pytest.param(Layout(tp=2), {}, marks=SLOW),
        pytest.param(Layout(dp=2), {"distributed_optimizer": False, "dtype": "bfloat16"}, marks=SLOW),
    ],
    ids=str,
)
def test_k113_four_steps_equal_two_and_resume_and_two(tiny: Path, tmp_path: Path, layout: Layout, options: Any) -> None:
    for whole, rest in on_ranks(layout, both, tiny, options, tmp_path):
        assert same(whole[0], rest[0])
        assert whole[1] == rest[1]
        assert same(whole[2], rest[2])
    assert same(load_file(tmp_path / "model.safetensors"), whole[0])  # though steps were taken while it was written
    files = [load_file(path) for path in (tmp_path / FOLDER).glob("rank-*.safetensors")]
    regions = [{name: value.numel() for name, value in file.items() if "@" in name} for file in files]
    vocabulary = TINY["vocab_size"]
    tensors = [load_file(tiny / "model.safetensors")[name] for name in whole[0]]
    pads = -vocabulary % layout.tp * sum(tensor.shape[1] for tensor in tensors if len(tensor) == vocabulary)
    written = sum(tensor.numel() for tensor in tensors) + pads
    assert sum(sum(one.values()) for one in regions) == 4 * written  # weights, two moments, the reference
    assert len(set().union(*regions)) == sum(map(len, regions))
    assert max(sum(one.values()) for one in regions) < 4 * written * (0.6 if len(files) > 1 else 1.1)


RESHARDED = [
    ("tiny", Layout(tp=2, pp=2), {}, [(Layout(dp=2), {})]),
    ("sparse", Layout(dp=2, ep=2), {}, [(Layout(), {"distributed_optimizer": False})]),
]
MORE_RESHARDED = [
    ("tiny", Layout(tp=2, pp=2), {}, [(Layout(), {})]),
    ("tiny", Layout(pp=2, vpp=2), {}, [(Layout(tp=2), {}), (Layout(cp=2), {})]),
    ("sparse", Layout(), {"distributed_optimizer": False}, [(Layout(tp=2, ep=2, etp=1), {})]),
    ("sparse", Layout(tp=2, ep=2, etp=1, dp=2), {}, [(Layout(pp=2, dp=2, ep=2), {})]),
]


@pytest.mark.parametrize(
    ("model", "layout", "options", "others"),
    [*RESHARDED, *(pytest.param(*case, marks=SLOW) for case in MORE_RESHARDED)],
    ids=str,
)
def test_a_checkpoint_goes_on_in_another_layout(
    model: str, layout: Layout, options: Any, others: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(model)
    whole = on_ranks(layout, saved, folder, options, tmp_path)[0]
    for other, other_options in others:
        rest = on_ranks(other, resumed, folder, other_options, tmp_path)[0]
        assert same(whole[0], rest[0])
        assert far(whole, rest) < 1e-5


def full(layout: Layout, place: Place, folder: Path, out: Path) -> tuple[list[str], bool, int]:
    trainer = rank_learner(layout, place, 0, folder, Case())
    messages = []
    trainer.save_state(out / "full")
    for act in (trainer.finish_save, lambda: trainer.save_state(out / "no")):
        with pytest.raises(TrainingError) as caught:
            act()
        messages.append(str(caught.value))
    trainer.step(random_batch(0))
    trainer.save_state(out / "fine")
    trainer.finish_save()
    trainer.finish_save()
    fine = Stored(out / "fine" / FOLDER).index["version"]
    trainer.close()
    return messages, (out / "full" / FOLDER / INDEX).exists(), fine


def test_all_ranks_hear_of_one_that_cannot_write(tiny: Path, tmp_path: Path) -> None:
    """The disk of rank 1 is full; then nothing can be created."""
    (tmp_path / "full" / FOLDER).mkdir(parents=True)
    (tmp_path / "full" / FOLDER / "rank-00001.safetensors").symlink_to("/dev/full")
    (tmp_path / "no").touch()
    found = on_ranks(Layout(dp=2), full, tiny, tmp_path)
    assert found[0] == found[1]
    (first, second), whole, version = found[0]
    assert first == (
        f"the checkpoint was not written: rank 1 cannot write {tmp_path}/full/{FOLDER}/rank-00001.safetensors: "
        "No space left on device"
    )
    assert second.startswith("rank 0 of 2 failed: NotADirectoryError")
    assert (whole, version) == (False, 1)


def refusals(layout: Layout, place: Place, folders: list[Path], out: Path) -> list[str]:
    """What is said of: no state, one not finished, a cut file, a lost one, another format, another model."""
    trainer = rank_learner(layout, place, 0, folders[0], Case())
    trainer.save_state(out / "whole")
    trainer.finish_save()
    said = []

    def refused(name: str) -> None:
        before = weights(trainer)
        with pytest.raises(RunFolderError) as caught:
            trainer.load(out / name)
        assert same(before, weights(trainer))
        said.append(str(caught.value).replace(str(out), "OUT"))

    for name in ("cut", "lost", "format", "none", "begun"):
        shutil.copytree(out / "whole", out / name)
    (out / "cut" / FOLDER / "rank-00000.safetensors").write_bytes(b"x")
    (out / "lost" / FOLDER / "rank-00000.safetensors").unlink()
    index = json.loads((out / "format" / FOLDER / INDEX).read_text())
    (out / "format" / FOLDER / INDEX).write_text(json.dumps({**index, "format": 99}))
    shutil.rmtree(out / "none" / FOLDER)
    (out / "begun" / FOLDER / INDEX).unlink()
    for name in ("none", "begun", "cut", "lost", "format"):
        refused(name)
    trainer.close()
    trainer = rank_learner(layout, place, 1, folders[1], Case())
    refused("whole")
    trainer.close()
    return said


def test_what_is_no_checkpoint_of_this_run_is_refused_before_anything_changes(
    tiny: Path, sparse: Path, tmp_path: Path
) -> None:
    other = save_model(tmp_path / "more", Qwen3MoeConfig(**TINY, **{**EXPERTS, "num_experts": 8}))
    state = f"OUT/{{}}/{FOLDER}"
    none, begun, cut, lost, version, model = on_ranks(Layout(), refusals, [sparse, other], tmp_path)[0]
    assert none == f"OUT/none has no {FOLDER}/; give a checkpoint that a Megatron learner has written"
    assert begun.startswith(f"{state.format('begun')} is no checkpoint that a Megatron learner has written to its end")
    assert cut.startswith(f"{state.format('cut')}/rank-00000.safetensors has 1 bytes, not ")
    assert lost.startswith(f"{state.format('lost')}/rank-00000.safetensors has no bytes, not ")
    assert version == f"{state.format('format')} has format 99; this version reads 2"
    assert model == (
        f"{state.format('whole')} belongs to another model (experts 4 there, 8 here); set model.name to the model that "
        "the run began with"
    )


def streams(layout: Layout, place: Place, folder: Path, out: Path) -> list[bool]:
    """Whether each random stream goes on where it was."""
    trainer = rank_learner(layout, place, 0, folder, Case())
    torch.rand(3 + place.rank)
    trainer.save_state(out)
    trainer.finish_save()
    before = {name: state.clone() for name, state in random_states().items()}
    trainer.close()
    trainer = rank_learner(layout, place, 1, folder, Case())
    torch.manual_seed(77)
    trainer.load(out)
    after = random_states()
    trainer.close()
    return [torch.equal(before[name], after[name]) for name in ("torch", *sorted(before))]


def test_random_streams_of_each_rank_go_on(tiny: Path, tmp_path: Path) -> None:
    for equal in on_ranks(Layout(dp=2), streams, tiny, tmp_path):
        assert len(equal) > 2
        assert all(equal)


# Files ---------------------------------------------------------------------------------------------------------------


def test_files_are_safetensors(tmp_path: Path) -> None:
    tensors = {
        "a@0,0": torch.randn(3, 5),
        "b@0": torch.arange(7),
        "c@0": torch.randn(4).to(torch.bfloat16),
        "none": torch.zeros(0, 4),
        "rng.x": torch.arange(9, dtype=torch.uint8),
    }
    write_tensors(tmp_path / "x.safetensors", tensors)
    found = load_file(tmp_path / "x.safetensors")
    assert same(found, tensors)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_any_region_is_read_from_any_cut(cut: int, tmp_path: Path) -> None:
    whole = torch.randn(6, 12)
    shape = (6, 12)
    files = []
    for number, columns in enumerate(torch.arange(12).chunk(cut)):
        part = whole[:, columns]
        region = Region("w", shape, (0, int(columns[0])), (6, len(columns)))
        tensors = {region.name: part.contiguous()}
        writing = Writing({tmp_path / f"{number}": partial(write_tensors, tmp_path / f"{number}", tensors)})
        assert writing.wait() is None
        files.append((f"{number}", [region]))
    sizes = {name: (tmp_path / name).stat().st_size for name, _ in files}
    write_index(tmp_path, {"files": sizes, "tensors": table(files)})
    stored = Stored(tmp_path)
    for rows, columns in ((6, 12), (2, 4), (3, 5), (1, 1)):
        for top in range(6 - rows + 1):
            for left in range(12 - columns + 1):
                found = stored.read(Region("w", shape, (top, left), (rows, columns)))
                assert torch.equal(found, whole[top : top + rows, left : left + columns])
    padded = stored.read(Region("w", (8, 12), (4, 0), (4, 12)))
    assert torch.equal(padded, torch.cat([whole[4:], torch.zeros(2, 12)]))
    assert torch.equal(stored.read(Region("w", (8, 12), (6, 0), (2, 12))), torch.zeros(2, 12))
    stored.check(Region("w", (8, 12), (4, 0), (4, 12)), padded=True)
    with pytest.raises(RunFolderError, match=r"has 'w' of shape \[6, 12\], but the model loaded has \[8, 12\]"):
        stored.check(Region("w", (8, 12), (4, 0), (4, 12)), padded=False)
    with pytest.raises(RunFolderError, match="has no tensor 'v'"):
        stored.check(Region("v", shape, (0, 0), (6, 12)), padded=False)


def test_a_gap_is_no_table() -> None:
    with pytest.raises(RunFolderError, match="w: ranks have 6 of 12 numbers"):
        table([("0", [Region("w", (12,), (0,), (6,))])])
