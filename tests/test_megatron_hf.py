"""Weights into any layout and out of it again, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import megatron_models
import pytest
import torch
import transformers
from megatron_kit import on_ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from relax_gym.errors import ModelError
from relax_gym.models import WEIGHTS, WEIGHTS_INDEX
from relax_gym_trainers.megatron_learner import hf, model
from relax_gym_trainers.megatron_learner.families.base import sizes
from relax_gym_trainers.megatron_learner.families.forms import (
    Columns,
    Copied,
    Form,
    GateUp,
    QueryKeyValue,
    Rows,
    Sizes,
    Vocabulary,
)
from relax_gym_trainers.megatron_learner.parallel import Layout
from relax_gym_trainers.model_folder import Checkpoint, write_folder

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models whose weights are in several files."""
    found = {}
    for name in ("qwen2", "qwen3_tied", "qwen3_moe", "mixtral"):
        found[name] = tmp_path_factory.mktemp(name)
        megatron_models.write(megatron_models.CONFIGS[name](), found[name], max_shard_size="200KB")
        assert (found[name] / WEIGHTS_INDEX).is_file()
    return found


def saved(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def round_trip(layout: Layout, folder: Path, target: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    config = transformers.AutoConfig.from_pretrained(folder)
    chunks = model.from_folder(folder, config, layout, dtype)
    export = hf.Export(chunks, config, bucket_bytes=50_000)
    first = torch.distributed.get_rank() == 0
    write_folder(export, folder, target if first else None, shard_bytes=100_000)
    return {name: tensor.clone() for name, tensor in export}


def check_round_trip(folder: Path, target: Path, layout: Layout) -> None:
    ranks = on_ranks(layout, round_trip, folder, target, torch.float32)
    want = saved(folder)
    for got in [*ranks, saved(target)]:
        assert set(got) == set(want)
        assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen2", Layout(tp=2)),
        ("qwen3_tied", Layout(tp=2, pp=2)),
        ("qwen3_moe", Layout(pp=2, vpp=2, dp=2, ep=2)),
    ],
    ids=str,
)
def test_what_is_loaded_is_exported_bit_for_bit(
    folders: dict[str, Path], tmp_path: Path, name: str, layout: Layout
) -> None:
    check_round_trip(folders[name], tmp_path, layout)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "qwen3_tied", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(tp=2),
        Layout(pp=2),
        Layout(pp=2, vpp=2),
        Layout(dp=2, ep=2),
        Layout(tp=2, ep=2, etp=1),
        Layout(tp=2, dp=2, ep=2, etp=2),
        Layout(tp=2, pp=2, ep=2, etp=1),
    ],
    ids=str,
)
def test_every_layout_exports_what_it_loaded(
    folders: dict[str, Path], tmp_path: Path, name: str, layout: Layout
) -> None:
    if layout.ep > 1 and name not in ("qwen3_moe", "mixtral"):
        layout = Layout(tp=layout.tp, pp=layout.pp, vpp=layout.vpp, dp=layout.dp)
    check_round_trip(folders[name], tmp_path, layout)


def export_moved(layout: Layout, folder: Path) -> dict[str, Tensor]:
    config = transformers.AutoConfig.from_pretrained(folder)
    chunks = model.from_folder(folder, config, layout, torch.float32)
    export = hf.Export(chunks, config)
    for parameter in chunks[0].parameters():  # as data-parallel wrappers do, and then an optimizer
        parameter.data = parameter.detach() + 1
    return {name: tensor.clone() for name, tensor in export}


def test_an_export_gives_the_weights_of_now(folders: dict[str, Path]) -> None:
    want = saved(folders["qwen3_moe"])
    got = on_ranks(Layout(), export_moved, folders["qwen3_moe"])[0]
    assert all(torch.equal(got[name], want[name] + 1) for name in want)


@pytest.mark.parametrize("name", ["qwen3_tied", "qwen3_moe"])
def test_transformers_loads_what_is_exported(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    on_ranks(Layout(), round_trip, folders[name], tmp_path, torch.bfloat16)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    index = json.loads((tmp_path / WEIGHTS_INDEX).read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in saved(tmp_path).values())
    with safe_open(tmp_path / files[0], framework="pt") as file:
        assert file.metadata() == {"format": "pt"}

    loaded: Any = transformers.AutoModelForCausalLM
    want = loaded.from_pretrained(folders[name], dtype=torch.bfloat16).state_dict()
    back, report = loaded.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert back.dtype == torch.bfloat16
    assert all(torch.equal(tensor, want[key]) for key, tensor in back.state_dict().items())


def test_a_small_model_is_one_file(folders: dict[str, Path], tmp_path: Path) -> None:
    write_folder(iter([("a", torch.ones(2))]), folders["qwen2"], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "generation_config.json", WEIGHTS]


class Watched:
    """Says which rows were read."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.read = tensor, 0

    def __getitem__(self, index: Any) -> Tensor:
        part = self.tensor[index]
        self.read += part.numel()
        return part


def test_queries_keys_and_values_are_interleaved_by_group() -> None:
    numbers = Sizes(heads=4, groups=2, head=1, vocabulary=0)
    query, key, value = torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11]), torch.tensor([20, 21])
    form = QueryKeyValue()
    whole = [query, key, value]
    assert form.cut(whole, torch.Size([8]), 0, numbers).tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    parts = [form.cut(whole, torch.Size([4]), rank, numbers) for rank in range(2)]
    assert [part.tolist() for part in parts] == [[0, 1, 10, 20], [2, 3, 11, 21]]
    assert [tensor.tolist() for tensor in form.join(parts, numbers)] == [[0, 1, 2, 3], [10, 11], [20, 21]]


def test_gates_stand_before_what_they_gate_on_each_rank() -> None:
    numbers = Sizes(heads=1, groups=1, head=1, vocabulary=0)
    whole = [torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11, 12, 13])]
    parts = [GateUp().cut(whole, torch.Size([4]), rank, numbers) for rank in range(2)]
    assert [part.tolist() for part in parts] == [[0, 1, 10, 11], [2, 3, 12, 13]]
    assert [tensor.tolist() for tensor in GateUp().join(parts, numbers)] == [[0, 1, 2, 3], [10, 11, 12, 13]]


@pytest.mark.parametrize("form", [Copied, Rows, Columns, Vocabulary, QueryKeyValue, GateUp])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_joined_keeps_nothing_that_was_gathered_beside_it(form: type[Form], ranks: int) -> None:
    gathered = torch.zeros(ranks, 10_000)
    parts = [row[:64].view(8, 8) for row in gathered]
    for tensor in form().join(parts, Sizes(heads=4, groups=2, head=ranks, vocabulary=8 * ranks)):
        assert tensor.untyped_storage().nbytes() <= sum(part.nbytes for part in parts)


def test_zeros_follow_a_vocabulary_that_ranks_do_not_divide() -> None:
    numbers = Sizes(heads=1, groups=1, head=1, vocabulary=3)
    whole = torch.tensor([[1.0], [2.0], [3.0]])
    parts = [Vocabulary().cut([whole], torch.Size([1, 1]), rank, numbers) for rank in range(5)]
    assert torch.cat(parts).flatten().tolist() == [1, 2, 3, 0, 0]
    assert torch.equal(Vocabulary().join(parts, numbers)[0], whole)


def test_a_rank_reads_only_its_part() -> None:
    whole = [Watched(torch.randn(8, 4)), Watched(torch.randn(8, 4))]
    GateUp().cut(whole, torch.Size([4, 4]), 3, Sizes(1, 1, 1, 1))
    assert [tensor.read for tensor in whole] == [8, 8]
    assert sizes(megatron_models.CONFIGS["qwen2"]()) == Sizes(4, 2, 16, megatron_models.VOCABULARY)


def load_changed(layout: Layout, folder: Path) -> str:
    try:
        model.from_folder(folder, transformers.AutoConfig.from_pretrained(folder), layout, torch.float32)
    except ModelError as error:
        return str(error)
    return "loaded"


def changed(folder: Path, target: Path, change: Any) -> str:
    """What loading says after `change` of the tensors, on the first rank of two."""
    tensors = saved(folder)
    change(tensors)
    shutil.copytree(folder, target, ignore=lambda _, names: [n for n in names if "safetensors" in n])
    save_file(tensors, target / WEIGHTS)
    return str(on_ranks(Layout(), load_changed, target)[0])


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(Q), f"has no tensor '{Q}'; is config.json the one of these weights?"),
        (lambda tensors: tensors.update({Q: tensors[Q][:32].clone()}), "do not fill decoder.layers.1.self_attention"),
        (
            lambda tensors: tensors.update({Q + "x": torch.ones(1)}),
            f"has 1 tensors that a qwen2 model does not, as '{Q}x'",
        ),
        (lambda tensors: tensors.update({"model.rotary_emb.inv_freq": torch.ones(1)}), "loaded"),
        (lambda tensors: tensors.update({"lm_head.weight": torch.ones(140, 64)}), "8384 numbers"),
    ],
    ids=["missing", "short", "strange", "determined", "vocabulary"],
)
def test_weights_that_are_not_those_of_the_config_are_refused(
    folders: dict[str, Path], tmp_path: Path, change: Any, message: str
) -> None:
    assert message in changed(folders["qwen2"], tmp_path / "changed", change)


HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.update({HEAD: tensors[EMBEDDINGS].clone()}), "loaded"),
        (lambda tensors: tensors.update({HEAD: -tensors[EMBEDDINGS]}), "set tie_word_embeddings to false there"),
        (
            lambda tensors: tensors.update({HEAD: tensors[EMBEDDINGS][:-1].clone()}),
            f"has {HEAD} apart from {EMBEDDINGS}",
        ),
    ],
    ids=["same", "other", "short"],
)
def test_a_head_that_the_config_ties_must_be_the_embeddings(
    folders: dict[str, Path], tmp_path: Path, change: Any, message: str
) -> None:
    """`transformers` would keep another one apart."""
    assert message in changed(folders["qwen3_tied"], tmp_path / "changed", change)


def test_a_whole_file_is_read_though_an_older_index_is_beside_it(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["qwen2"], tmp_path, dirs_exist_ok=True)
    save_file({name: tensor + 1 for name, tensor in saved(tmp_path).items()}, tmp_path / WEIGHTS, {"format": "pt"})
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert all(torch.equal(checkpoint[name][...], tensor) for name, tensor in loaded.state_dict().items())


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no model.safetensors; the Megatron learner reads safetensors only"):
        Checkpoint(tmp_path)
