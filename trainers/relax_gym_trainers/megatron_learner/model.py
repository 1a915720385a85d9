"""The language model of a Hugging Face folder as Megatron's pipeline chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import PretrainedConfig

from relax_gym.errors import ModelError
from relax_gym_trainers.megatron_learner import compat, hf
from relax_gym_trainers.megatron_learner.families import family_of
from relax_gym_trainers.megatron_learner.families.base import head_size, padding_token, rotary
from relax_gym_trainers.megatron_learner.modules.adapters import AdaptedColumn, AdaptedRow
from relax_gym_trainers.megatron_learner.modules.attention import CoreAttention
from relax_gym_trainers.megatron_learner.modules.experts import submodules_of, use_grouped
from relax_gym_trainers.megatron_learner.modules.mlp import use_gated
from relax_gym_trainers.megatron_learner.modules.norms import RMSNorm
from relax_gym_trainers.megatron_learner.parallel import Layout
from relax_gym_trainers.megatron_learner.rope import RotaryAttention, keep_angles
from relax_gym_trainers.megatron_learner.towers import DeepStack, MediaInputs, Towers, check_deep_stack, keep_deep_stack

from megatron.core import parallel_state  # isort: skip
from megatron.core.models.gpt import GPTModel  # isort: skip
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # isort: skip
from megatron.core.tensor_parallel import (  # isort: skip
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig  # isort: skip
from megatron.core.transformer.spec_utils import ModuleSpec  # isort: skip
from megatron.core.transformer.transformer_block import (  # isort: skip
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import TransformerLayer  # isort: skip


class LanguageModel(GPTModel):  # type: ignore[misc]
    """A chunk of a model that takes packed rows; the last one gives hidden states instead of logits."""

    def __init__(
        self, *args: Any, frequencies: Tensor, axes: Tensor | None = None, padding: int | None = None, **options: Any
    ) -> None:
        """`padding` is the token whose embedding learns nothing from where it is read, if there is one."""
        super().__init__(*args, position_embedding_type="none", **options)
        self.frequencies, self.axes, self.padding = frequencies, axes, padding
        self.towers: Towers | None = None

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, packed_seq_params: Any, media: MediaInputs | None = None
    ) -> Tensor:
        """One micro-batch through this chunk.

        Args:
            input_ids: This context-parallel rank's tokens [1, t]; used by the first stage.
            position_ids: Their positions, each row from 0, [1, t] or [axes, t]; used by every stage.
            packed_seq_params: Where the rows of the pack are (`thd`). It keeps the angles of the positions.
            media: What the placeholders among the tokens stand for; used by the first stage.

        Returns:
            On the last stage the normed hidden states of all t tokens [t, hidden], the same on every tensor-parallel
            rank, each of which gives their whole gradient back. Before it, what the next stage takes.
        """
        keep_angles(packed_seq_params, position_ids, self.frequencies, self.config.params_dtype, self.axes)
        seen = self._see(input_ids, media, packed_seq_params) if self.pre_process else None
        out: Tensor = super().forward(
            input_ids, position_ids, None, decoder_input=seen, packed_seq_params=packed_seq_params
        )
        return out

    def _see(self, input_ids: Tensor, media: MediaInputs | None, packed_seq_params: Any) -> Tensor:
        """What goes into the first layer, [t, 1, hidden], or under sequence parallelism this rank's run of it."""
        hidden: Tensor = self.embedding(input_ids=input_ids, position_ids=None)
        first = self.pg_collection.tp.rank() * len(hidden) if self.config.sequence_parallel else 0
        if self.padding is not None:
            pads = input_ids[0, first : first + len(hidden), None, None] == self.padding
            hidden = torch.where(pads, hidden.detach(), hidden)
        if media is None:
            return hidden
        assert self.towers is not None
        rows, which = media.within(first, len(hidden))
        features, deep = self.towers(media)
        hidden = hidden.index_copy(0, rows, features[which, None].to(hidden))
        if deep:
            packed_seq_params.deep_stack = DeepStack(rows, torch.stack(deep)[:, which])
            hidden = packed_seq_params.deep_stack.begin(hidden)
        return hidden

    def _postprocess(self, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return hidden_states.squeeze(1)


def output_weight(chunk: Any) -> Tensor:
    """This rank's rows [padded vocabulary / tp, hidden] of the last stage's output weight, tied or not."""
    model = hf.unwrapped(chunk)
    weight: Tensor
    if model.share_embeddings_and_output_weights:
        weight = model.shared_embedding_or_output_weight()
    else:
        weight = model.output_layer.weight
    return weight


def padded_vocabulary(config: PretrainedConfig, layout: Layout) -> int:
    """The vocabulary with what makes it a multiple of the tensor-parallel ranks; the added rows are zeros."""
    size: int = config.vocab_size
    return -(-size // layout.tp) * layout.tp


def transformer_config(
    config: PretrainedConfig, layout: Layout, dtype: torch.dtype, **options: Any
) -> TransformerConfig:
    """Megatron's config of a model.

    Args:
        config: Text config in Hugging Face format.
        options: Arguments of `TransformerConfig` beside or instead of those chosen here (recompute, …).

    Raises:
        ModelError: the model is of no family here.
        ConfigError: it cannot be laid out so.
    """
    family = family_of(config)
    layout.check(config)
    _, factor = rotary(config)
    chosen = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": head_size(config),
        "ffn_hidden_size": config.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": silu,
        "add_bias_linear": False,
        "bias_activation_fusion": torch.cuda.is_available(),  # of a gate, without a bias too
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # Cosines and sines times a factor on queries and keys are scores times its square.
        "softmax_scale": None if factor == 1 else factor**2 / head_size(config) ** 0.5,
        # Packs differ in length; the stages of a pipeline must tell each other.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        "perform_initialization": False,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
    }
    return TransformerConfig(**chosen | layout.megatron_options() | family.options(config) | options)


def check_layout(config: PretrainedConfig, whole: PretrainedConfig, layout: Layout) -> None:
    """Raise what `build` would; `config` is the text part of `whole`."""
    family = family_of(config)
    layout.check(config)
    if family.towers:
        check_deep_stack(whole, config.num_hidden_layers // (layout.pp * layout.vpp))


def check_code(whole: PretrainedConfig, *, trusted: bool) -> None:
    """Raises ModelError where `transformers` would run code of a model's folder, which may compute something else."""
    if trusted and any(name.startswith("AutoModel") for name in getattr(whole, "auto_map", None) or ()):
        raise ModelError(
            "model.trust_remote_code = true, and config.json has code of its own in auto_map, but the Megatron learner "
            f"trains {whole.model_type} models as transformers has them; set it to false or use the torch learner"
        )


def build(
    config: PretrainedConfig,
    layout: Layout,
    dtype: torch.dtype,
    *,
    whole: PretrainedConfig | None = None,
    grouped: bool = True,
    **options: Any,
) -> list[LanguageModel]:
    """This rank's chunks (one, or `layout.vpp`), not filled; other arguments and errors as of `transformer_config`.

    `grouped` multiplies all experts of a rank at once, instead of one after the other. `whole` is the config that
    `config` is the text part of; a model that reads media needs it.
    """
    compat.prepare()
    megatron = transformer_config(config, layout, dtype, **options)
    frequencies, _ = rotary(config)
    axes = family_of(config).axes(config)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    chunks = []
    for number in range(layout.vpp):
        place = {"ignore_virtual": False, "vp_stage": number} if layout.vpp > 1 else {}
        chunk = LanguageModel(
            megatron,
            block_spec(megatron, number if layout.vpp > 1 else None, grouped=grouped),
            vocab_size=padded_vocabulary(config, layout),
            max_sequence_length=config.max_position_embeddings,
            share_embeddings_and_output_weights=config.tie_word_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            frequencies=frequencies.to(device),
            axes=None if axes is None else axes.to(device),
            padding=padding_token(config),
            **({"vp_stage": number} if layout.vpp > 1 else {}),
        )
        mark_shards(chunk)
        chunks.append(chunk.to(device, dtype))
    add_towers(chunks[0], config, whole, layout)
    return chunks


def add_towers(chunk: LanguageModel, config: PretrainedConfig, whole: PretrainedConfig | None, layout: Layout) -> None:
    """Put the encoders of a model that reads media in front of its first chunk, replicated on all that have this."""
    names = family_of(config).towers
    if not names:
        return
    if whole is None:
        raise ModelError(f"{config.model_type} models read media, which is supported for the trained model only")
    deep = check_deep_stack(whole, config.num_hidden_layers // (layout.pp * layout.vpp))
    if not chunk.pre_process:
        return
    device = chunk.frequencies.device
    chunk.towers = Towers(whole, names, config.hidden_size, device, chunk.config.params_dtype)
    keep_deep_stack(chunk.decoder.layers[:deep])
    for parameter in chunk.towers.parameters():
        # Each rank has the gradient that comes through its tokens; Megatron adds those of such parameters up.
        setattr(parameter, "sequence_parallel", chunk.config.sequence_parallel)  # noqa: B010  (mypy knows none)


def mark_shards(chunk: LanguageModel) -> None:
    """Say which parameters tensor-parallel ranks share, as Megatron does where it initialises weights; the norm of the
    gradient counts all others on one rank only."""
    for module in chunk.modules():
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
            dim = 0
        elif isinstance(module, RowParallelLinear):
            dim = 1
        else:
            continue
        for parameter in module.parameters(recurse=False):
            if hasattr(parameter, "tensor_model_parallel"):  # the bias of a ColumnParallelLinear
                continue
            shared = parameter.dim() > dim  # the bias of a RowParallelLinear is whole on every rank
            set_tensor_model_parallel_attributes(parameter, shared, dim if shared else -1, 1)


def from_folder(
    folder: Path, config: PretrainedConfig, layout: Layout, dtype: torch.dtype, **options: Any
) -> list[LanguageModel]:
    """`build`, filled with the weights of a model folder."""
    chunks = build(config, layout, dtype, **options)
    hf.load(chunks, folder, config)
    return chunks


def block_spec(
    config: TransformerConfig, vp_stage: int | None = None, *, grouped: bool = True
) -> TransformerBlockSubmodules:
    """The layers of a chunk: Megatron's local ones with this learner's norms, attention, experts and linears that
    can have adapters."""
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    ).submodules
    layer.self_attention.module = RotaryAttention
    attention = layer.self_attention.submodules
    attention.core_attention = CoreAttention
    attention.linear_qkv, attention.linear_proj = AdaptedColumn, AdaptedRow
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if not config.num_moe_experts:
        feed_forward = submodules_of(layer.mlp)
        feed_forward.linear_fc1, feed_forward.linear_fc2 = AdaptedColumn, AdaptedRow
        layer.mlp = use_gated(layer.mlp)
    elif grouped:
        use_grouped(layer.mlp)
    spec = ModuleSpec(module=TransformerLayer, submodules=layer)
    return TransformerBlockSubmodules(
        layer_specs=[spec] * get_num_layers_to_build(config, vp_stage=vp_stage), layer_norm=RMSNorm
    )
