"""Every layout gives the logits and gradients of `transformers`."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron_models
import pytest
import torch
import transformers
from megatron_kit import on_ranks
from torch import Tensor

from relax_gym.errors import ModelError
from relax_gym_trainers.megatron_learner import model
from relax_gym_trainers.megatron_learner.families import FAMILIES, family_of
from relax_gym_trainers.megatron_learner.families.base import rotary
from relax_gym_trainers.megatron_learner.optimizer import build_optimizer, forget, wrap
from relax_gym_trainers.megatron_learner.options import MegatronLearnerOptions
from relax_gym_trainers.megatron_learner.parallel import Layout

pytestmark = pytest.mark.usefixtures("one_thread")

Reference = tuple[Path, list[list[Tensor]], dict[str, Tensor]]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    """Filled as models are asked for."""
    return {}


@pytest.fixture
def reference(references: dict[str, Reference], tmp_path_factory: pytest.TempPathFactory) -> Any:
    def find(name: str) -> Reference:
        if name not in references:
            folder = tmp_path_factory.mktemp(name)
            megatron_models.write(megatron_models.CONFIGS[name](), folder)
            references[name] = (folder, *megatron_models.reference(folder))
        return references[name]

    return find


def compare(reference: Reference, layout: Layout, **options: Any) -> None:
    folder, logits, gradients = reference
    largest = max(float(row.abs().max()) for rows in logits for row in rows)
    for rank in on_ranks(layout, megatron_models.train_step, folder, logits, options):
        assert rank["logits"] <= 1e-5 * largest
        assert set(rank["gradients"]) == set(gradients)
        for name, gradient in rank["gradients"].items():
            error = (gradient - gradients[name]).abs().max() / gradients[name].abs().max()
            assert error <= 1e-5, name


@pytest.mark.parametrize("name", ["qwen3_tied", "qwen2", "mixtral"])
def test_one_process_computes_what_transformers_does(reference: Any, name: str) -> None:
    compare(reference(name), Layout())


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen2", Layout(tp=2, sequence_parallel=False)),
        ("qwen3_tied", Layout(pp=2, vpp=2)),
        ("qwen3_tied", Layout(cp=2)),
        ("qwen3_moe", Layout(tp=2, ep=2, etp=1)),
    ],
    ids=str,
)
def test_two_processes_compute_what_transformers_does(reference: Any, name: str, layout: Layout) -> None:
    compare(reference(name), layout)


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def said_while_built(layout: Layout) -> list[str]:
    kept, options = Kept(), MegatronLearnerOptions()
    logging.getLogger().addHandler(kept)
    wrapped = wrap(model.build(megatron_models.CONFIGS["qwen3_tied"](), layout, torch.float32), options)
    build_optimizer(wrapped, options, torch.float32)
    return kept.said


def test_a_model_is_built_without_a_word() -> None:
    """megatron-core warns of its own defaults and of modules that it does not know."""
    assert on_ranks(Layout(), said_while_built) == [[]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "llama", "mistral", "qwen3_moe", "qwen3_moe_unnormalised"])
def test_every_family_computes_what_transformers_does(reference: Any, name: str) -> None:
    compare(reference(name), Layout())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3_tied", Layout(tp=2, sequence_parallel=False)),
        ("qwen3_tied", Layout(tp=2)),
        ("qwen2", Layout(tp=2)),
        ("llama", Layout(tp=2)),
        ("qwen3_tied", Layout(pp=2)),
        ("qwen2", Layout(pp=2)),
        ("qwen2", Layout(pp=2, vpp=2)),
        ("qwen2", Layout(dp=2)),
        ("qwen2", Layout(cp=2)),
        ("qwen3_moe", Layout(ep=2, dp=2)),
        ("qwen3_moe", Layout(tp=2)),
        ("qwen3_moe", Layout(cp=2, ep=2)),
        ("mixtral", Layout(tp=2, ep=2, etp=1)),
        ("qwen3_tied", Layout(tp=2, pp=2)),
        ("qwen2", Layout(dp=2, cp=2)),
        ("qwen2", Layout(tp=2, cp=2)),
        ("mixtral", Layout(pp=2, dp=2, ep=2)),
        ("qwen3_moe", Layout(pp=2, vpp=2, dp=2, ep=2)),
        ("qwen3_moe", Layout(tp=2, dp=2, ep=2, etp=2)),
        ("qwen3_moe", Layout(tp=2, cp=2, ep=2, etp=1)),
    ],
    ids=str,
)
def test_every_layout_computes_what_transformers_does(reference: Any, name: str, layout: Layout) -> None:
    compare(reference(name), layout)


@pytest.mark.slow
def test_one_expert_after_the_other_gives_the_same(reference: Any) -> None:
    compare(reference("qwen3_moe"), Layout(tp=2), grouped=False)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2, vpp=2), Layout(tp=2, ep=2, etp=1)], ids=str)
def test_recomputing_the_layers_changes_nothing(reference: Any, layout: Layout) -> None:
    options = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    compare(reference("qwen3_moe" if layout.ep > 1 else "qwen2"), layout, **options)


def test_bfloat16_is_near(reference: Any) -> None:
    folder, logits, _ = reference("qwen3_tied")  # no router, which bfloat16 makes choose other experts
    largest = max(float(row.abs().max()) for rows in logits for row in rows)
    ranks = on_ranks(Layout(tp=2), megatron_models.train_step, folder, logits, {"dtype": torch.bfloat16})
    assert all(1e-5 * largest < rank["logits"] < 0.1 * largest for rank in ranks)
    assert {gradient.dtype for gradient in ranks[0]["gradients"].values()} == {torch.bfloat16}


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize("parameters", [YARN, LLAMA3], ids=["yarn", "llama3"])
def test_scaled_rotary_positions_are_those_of_transformers(tmp_path: Path, parameters: dict[str, Any]) -> None:
    config = transformers.LlamaConfig(**megatron_models.DENSE, rope_parameters=parameters)
    _, factor = rotary(config)
    assert (factor > 1.1) == (parameters is YARN)
    megatron_models.write(config, tmp_path)
    compare((tmp_path, *megatron_models.reference(tmp_path)), Layout())


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=str)
def test_the_padding_token_learns_nothing_where_it_is_read(tmp_path: Path, layout: Layout) -> None:
    """It may be a token of meaning: that of SmolLM 2 ends turns."""
    token = int(megatron_models.row(0, 2)[0])  # of the second rank
    config = transformers.LlamaConfig(**megatron_models.DENSE, pad_token_id=token, tie_word_embeddings=True)
    megatron_models.write(config, tmp_path)
    compare((tmp_path, *megatron_models.reference(tmp_path)), layout)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.GPT2Config(), "no family for model_type 'gpt2'; families: llama, mistral, .*; use the torch"),
        (transformers.LlamaConfig(attention_bias=True), "attention_bias = True, .* llama models only with False"),
        (transformers.MistralConfig(), "sliding_window = 4096, .* only with None"),
        (
            transformers.Qwen3MoeConfig(num_experts_per_tok=1, norm_topk_prob=True),
            "num_experts_per_tok = 1, .* 2 or more",
        ),
        (transformers.Qwen3MoeConfig(mlp_only_layers=[0]), r"mlp_only_layers = \[0\], .* only with \[\]"),
        (
            transformers.Qwen3Config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "has only rope_type default, linear, llama3, yarn on whole heads",
        ),
        (
            transformers.Qwen3Config(
                rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
            ),
            "on whole heads; use the torch learner",
        ),
    ],
)
def test_a_model_that_would_compute_something_else_is_refused(config: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        family_of(config)


def test_k38_positions_on_several_axes_are_refused() -> None:
    config = transformers.Qwen2Config()
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 24, 24]}
    with pytest.raises(ModelError, match=r"mrope_section = \[16, 24, 24\], .* qwen2 models only without any"):
        family_of(config)


def test_every_family_has_a_tiny_model_in_these_tests() -> None:
    assert {make().model_type for make in megatron_models.CONFIGS.values()} == {
        model_type for model_type, family in FAMILIES.items() if not family.towers
    }


def parts(layout: Layout, folder: Path) -> dict[str, Any]:
    config = transformers.AutoConfig.from_pretrained(folder)
    chunk = model.from_folder(folder, config, layout, torch.bfloat16)[-1]
    weight = model.output_weight(chunk) if chunk.post_process else None
    return {
        "weight": None if weight is None else weight.float().detach(),
        "dtypes": {parameter.dtype for parameter in chunk.parameters()},
        "scale": chunk.config.softmax_scale,
        "padded": model.padded_vocabulary(config, layout),
    }


def marks(layout: Layout, folder: Path) -> list[dict[str, tuple[bool, int]]]:
    config = transformers.AutoConfig.from_pretrained(folder)
    found = []
    for initialise in (True, False):
        chunks = model.build(config, layout, torch.float32, perform_initialization=initialise)
        found.append(
            {
                name: (getattr(parameter, "tensor_model_parallel", False), getattr(parameter, "partition_dim", -1))
                for name, parameter in chunks[0].named_parameters()
            }
        )
    return found


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
def test_parameters_know_how_they_are_shared_though_they_are_not_initialised(reference: Any, name: str) -> None:
    folder, *_ = reference(name)
    initialised, empty = on_ranks(Layout(tp=2), marks, folder)[0]
    assert empty == initialised
    assert {mark for mark, _ in empty.values()} == {True, False}


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2)], ids=str)
def test_the_last_stage_has_the_output_weight_of_a_tied_model(reference: Any, layout: Layout) -> None:
    folder, *_ = reference("qwen3_tied")
    ranks = on_ranks(layout, parts, folder)
    rows = [rank["weight"] for rank in ranks if rank["weight"] is not None]
    tied = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).lm_head.weight.float()
    whole = torch.cat(rows)
    assert torch.equal(whole[: len(tied)], tied)
    assert len(whole) == ranks[0]["padded"] == (132 if layout.tp == 2 else 131)
    assert not whole[len(tied) :].any()
    assert ranks[0]["dtypes"] == {torch.bfloat16}


def test_nothing_of_a_warm_up_is_left_in_an_optimizer_that_counts_for_a_group() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    adam = torch.optim.AdamW([weight])
    adam.state[weight] = {"exp_avg": torch.ones(2)}
    adam.param_groups[0]["step"] = 7  # as Transformer Engine's and Apex's do
    forget(SimpleNamespace(optimizer=adam))
    assert not adam.state
    assert "step" not in adam.param_groups[0]
