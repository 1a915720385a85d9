"""Adapters of the torch learner: which modules have them, and that what is published is what was trained."""

from __future__ import annotations

import pytest
import torch
from learner_cases import SMALL, context, learner, qwen3, random_batch, save_model, weights
from transformers import AutoModelForCausalLM, DeepseekV3Config, GPT2Config, MixtralConfig, Qwen3MoeConfig

from relax_gym.errors import ConfigError

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
DEEPSEEK = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
EXPERTS = {
    "qwen3": Qwen3MoeConfig(**SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "deepseek": DeepseekV3Config(**{**SMALL, "num_key_value_heads": 4}, **DEEPSEEK),
}


def trained(run, **lora):
    """A learner after a step, and the modules whose weights it has changed."""
    trainer = learner(run, lora={"rank": 2, **lora})
    before = weights(trainer)
    trainer.step(random_batch())
    changed = {n.removesuffix(".weight") for n, value in trainer.weights() if not torch.equal(value, before[n])}
    return trainer, changed


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_experts_have_no_adapters_and_the_model_trains_publishes_and_exports(family, tmp_path):
    trainer, changed = trained(context(save_model(tmp_path / "model", EXPERTS[family])))
    assert changed == {f"model.layers.{layer}.self_attn.{name}" for layer in (0, 1) for name in ATTENTION}
    trainer.export(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    given = weights(trainer)
    assert given.keys() == {name for name, _ in loaded.named_parameters()}
    assert all(torch.equal(given[name], tensor) for name, tensor in loaded.named_parameters())
    ids = torch.tensor([[3, 4, 5, 6]])
    torch.testing.assert_close(loaded(ids).logits, trainer.policy.model(ids).logits, rtol=1e-4, atol=1e-4)


def test_linears_beside_experts_have_adapters(tmp_path):
    _, changed = trained(context(save_model(tmp_path, EXPERTS["deepseek"])))
    inside = {name.removeprefix("model.layers.") for name in changed if ".mlp." in name}
    assert inside == {
        f"{part}.{name}_proj" for part in ("0.mlp", "1.mlp.shared_experts") for name in ("gate", "up", "down")
    }


def test_an_export_has_the_models_buffers(tmp_path):
    folder = save_model(tmp_path / "model", EXPERTS["deepseek"])
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.layers[1].mlp.gate.e_score_correction_bias.copy_(torch.arange(4.0))
    model.save_pretrained(folder)
    learner(context(folder), lora={"rank": 2}).export(tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")  # peft sets it by itself
def test_all_linear_takes_in_the_linears_of_gpt2(tmp_path):
    config = GPT2Config(vocab_size=61, n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=1)
    _, changed = trained(context(save_model(tmp_path, config)))
    parts = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert changed == {f"transformer.h.{layer}.{part}" for layer in (0, 1) for part in parts}


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("experts",), "Target module Qwen3MoeExperts"),
        (("gate",), "Target module Qwen3MoeTopKRouter"),
        (("gate_proj", "up_proj", "down_proj"), "not found in the base model"),
        (("q_proj", "up_proj"), "no linear is called up_proj; experts that are stacked in one tensor"),
    ],
)
def test_experts_that_are_named_are_refused(targets, message, tmp_path):
    folder = save_model(tmp_path, EXPERTS["qwen3"])
    with pytest.raises(ConfigError, match=rf"learner\.lora\.targets = .*{message}"):
        learner(context(folder), lora={"targets": targets})


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_a_weight_that_embedding_and_head_share_cannot_be_adapted(name, tmp_path):
    message = rf"adapts (model\.)?{name}, but model\.embed_tokens and lm_head have one weight .* leave both out"
    with pytest.raises(ConfigError, match=message):
        learner(context(save_model(tmp_path, qwen3())), lora={"targets": ("q_proj", name)})


def test_embedding_and_head_of_their_own_weights_can_be_adapted(tmp_path):
    run = context(save_model(tmp_path, qwen3(tie_word_embeddings=False)))
    _, changed = trained(run, targets=("lm_head", "embed_tokens"))
    assert changed == {"lm_head", "model.embed_tokens"}
