"""What a family of models declares: its options in Megatron, and where its tensors are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from relax_gym.errors import ModelError
from relax_gym_trainers.megatron_learner.families.forms import (
    Columns,
    Copied,
    Form,
    GateUp,
    QueryKeyValue,
    Sizes,
    Vocabulary,
)

FIXED_ROPE = ("linear", "llama3", "yarn")
"""Kinds of rotary scaling that do not depend on how long a row is."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron parameter and the hub tensors that lie in it; `{layer}` and `{expert}` count from 0, `{rest}` is the
    same on both sides: all parameters of a module."""

    megatron: str
    hub: tuple[str, ...]
    form: Form

    @property
    def of_experts(self) -> bool:
        return "{expert}" in self.megatron

    @property
    def of_module(self) -> bool:
        return "{rest}" in self.megatron


@dataclass(frozen=True)
class Family:
    """Models that differ only in sizes.

    Attributes:
        model_types: `model_type` of the configs.
        rules: Where tensors are.
        options: Config → arguments of `TransformerConfig` beside the common ones.
        needs: Config field → the only value that these rules and options are right for, where the field is there.
        interleaved: Whether the axes of M-RoPE take turns in a head's frequencies, or have a section each; None where
            positions have one axis.
        towers: Names of the modules that turn media into embeddings, in the model of `transformers`.
    """

    model_types: tuple[str, ...]
    rules: tuple[Rule, ...]
    options: Callable[[Any], dict[str, Any]] = lambda config: {}
    needs: dict[str, Any] = field(default_factory=dict)
    interleaved: bool | None = None
    towers: tuple[str, ...] = ()

    @property
    def embedding(self) -> Rule:
        return next(rule for rule in self.rules if rule.megatron == EMBEDDING.megatron)

    def check(self, config: PretrainedConfig) -> None:
        """Raises ModelError where the config asks for what the family is not right for, naming the field."""
        for name, value in self.needs.items():
            given = getattr(config, name, value)
            if given != value:
                raise ModelError(
                    f"config.json has {name} = {given!r}, but the Megatron learner trains {config.model_type} models "
                    f"only with {value!r}; use the torch learner"
                )
        rotary(config)
        self.options(config)
        sections = config.rope_parameters.get("mrope_section")
        if (sections is None) != (self.interleaved is None):
            raise ModelError(
                f"config.json has mrope_section = {sections}, but the Megatron learner trains {config.model_type} "
                f"models only with{'out' if self.interleaved is None else ''} any; use the torch learner"
            )

    def axes(self, config: PretrainedConfig) -> Tensor | None:
        """Of which axis of positions each of the [head / 2] frequencies is; None where there is one axis."""
        if self.interleaved is None:
            return None
        sections = config.rope_parameters["mrope_section"]
        if not self.interleaved:
            return torch.arange(len(sections)).repeat_interleave(torch.tensor(sections))
        axes = torch.zeros(head_size(config) // 2, dtype=torch.long)
        for axis in range(1, len(sections)):
            axes[axis : sections[axis] * len(sections) : len(sections)] = axis
        return axes

    def hub_names(self, config: PretrainedConfig) -> Iterator[tuple[Rule, int, int, tuple[str, ...]]]:
        """All of a model's (rule, layer, expert, hub names), tied output weights and whole modules left out."""
        for rule in self.rules:
            if rule.of_module or (rule is OUTPUT and config.tie_word_embeddings):
                continue
            for layer in range(config.num_hidden_layers if "{layer}" in rule.megatron else 1):
                for expert in range(number_of_experts(config) if rule.of_experts else 1):
                    yield rule, layer, expert, tuple(n.format(layer=layer, expert=expert) for n in rule.hub)


M, H = "decoder.layers.{layer}.", "model.layers.{layer}."

EMBEDDING = Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Vocabulary())
OUTPUT = Rule("output_layer.weight", ("lm_head.weight",), Vocabulary())

FRAME = (
    EMBEDDING,
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",), Copied()),
    OUTPUT,
    Rule(M + "input_layernorm.weight", (H + "input_layernorm.weight",), Copied()),
    Rule(M + "pre_mlp_layernorm.weight", (H + "post_attention_layernorm.weight",), Copied()),
)


def query_key_value(what: str) -> Rule:
    """`what` is weight or bias."""
    names = tuple(f"{H}self_attn.{letter}_proj.{what}" for letter in "qkv")
    return Rule(f"{M}self_attention.linear_qkv.{what}", names, QueryKeyValue())


ATTENTION = (
    query_key_value("weight"),
    Rule(M + "self_attention.linear_proj.weight", (H + "self_attn.o_proj.weight",), Columns()),
)
NORMED_HEADS = tuple(
    Rule(f"{M}self_attention.{letter}_layernorm.weight", (f"{H}self_attn.{letter}_norm.weight",), Copied())
    for letter in "qk"
)


def feed_forward(megatron: str, hub: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Any:
    """The rules of a gated feed-forward network, its names given as gate, up and down."""
    gate, up, down = (f"{H}{hub}.{name}.weight" for name in names)
    return (
        Rule(f"{M}{megatron}.linear_fc1.weight", (gate, up), GateUp()),
        Rule(f"{M}{megatron}.linear_fc2.weight", (down,), Columns()),
    )


def with_towers(rules: Sequence[Rule], decoder: str, **towers: str) -> tuple[Rule, ...]:
    """The rules with the decoder's hub names under `decoder` instead of `model.`, and those of modules, each given as
    the module's name and what its hub names begin with."""
    moved = [
        rule if rule is OUTPUT else replace(rule, hub=tuple(decoder + name.removeprefix("model.") for name in rule.hub))
        for rule in rules
    ]
    modules = [Rule(f"towers.{name}.{{rest}}", (hub + "{rest}",), Copied()) for name, hub in towers.items()]
    return (*moved, *modules)


MLP = feed_forward("mlp", "mlp")
EXPERT = "mlp.experts.local_experts.{expert}"


def number_of_experts(config: PretrainedConfig) -> int:
    """0 in a dense model."""
    return int(getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0)


def expert_size(config: PretrainedConfig) -> int:
    """Hidden units of an expert."""
    return int(getattr(config, "moe_intermediate_size", None) or config.intermediate_size)


def head_size(config: PretrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def sizes(config: PretrainedConfig) -> Sizes:
    return Sizes(config.num_attention_heads, config.num_key_value_heads, head_size(config), config.vocab_size)


def padding_token(config: PretrainedConfig) -> int | None:
    """The token whose embedding `transformers` gives no gradient where it is read; counted from the end if negative."""
    token, size = getattr(config, "pad_token_id", None), config.vocab_size
    return None if token is None or token >= size else int(token % size)


def rotary(config: PretrainedConfig) -> tuple[Tensor, float]:
    """Inverse frequencies [head / 2] and what cosines and sines are multiplied by, as `transformers` computes them.

    Raises:
        ModelError: frequencies that depend on how long a row is, or turn a part of each head only.
    """
    parameters = config.rope_parameters
    kind = parameters.get("rope_type")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0 or kind not in ("default", *FIXED_ROPE):
        raise ModelError(
            f"config.json has rope_parameters = {parameters}, but the Megatron learner has only rope_type default, "
            f"{', '.join(FIXED_ROPE)} on whole heads; use the torch learner"
        )
    if kind != "default":
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config)
        return frequencies, float(factor)
    exponents = torch.arange(0, head_size(config), 2, dtype=torch.float) / head_size(config)
    return 1.0 / parameters["rope_theta"] ** exponents, 1.0


def mixture(config: PretrainedConfig, *, normalised: bool) -> dict[str, Any]:
    """Options of a mixture of experts; `normalised` says whether the chosen experts' weights sum to 1.

    Raises:
        ModelError: a sum of one weight, which Megatron's router does not have.
    """
    if normalised and config.num_experts_per_tok == 1:
        raise ModelError(
            "config.json has num_experts_per_tok = 1, whose weight is always 1, but the Megatron learner trains "
            f"{config.model_type} models with normalised weights only with 2 or more; use the torch learner"
        )
    return {
        "num_moe_experts": number_of_experts(config),
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": expert_size(config),
        # No balancing loss: it would pull the router away from what the policy gradient asks for.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_pre_softmax": not normalised,
        "moe_router_dtype": "fp32",
    }
