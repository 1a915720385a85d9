"""The names that SGLang looks up in its CPU kernels, which PyPI does not have. All raise when called: with the
`torch_native` attention backend none is, and everything that runs is SGLang's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch

__version__ = "0+cpu-shim"
FUNCTIONS = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)
# `convert_weight_packed` must not be among them: by it SGLang tells that it has real kernels
OPERATORS = (
    "fused_gdn_gating_cpu",
    "fused_moe_router_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_sigmoid_mul_cpu",
)


def missing(name: str) -> Callable[..., NoReturn]:
    """A function that is not there."""

    def function(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name}: SGLang's CPU kernels are not installed")

    return function


globals().update({name: missing(name) for name in FUNCTIONS})
for name in OPERATORS:
    if not hasattr(torch.ops.sgl_kernel, name):
        setattr(torch.ops.sgl_kernel, name, missing(name))
