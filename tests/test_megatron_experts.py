"""Grouped experts beside Megatron's sequential ones: results, gradients, steps, checkpoints, and names."""

from __future__ import annotations

import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_modules_kit import on_quiet_ranks, transformer_config
from torch import Tensor

from relax_gym.errors import ConfigError
from relax_gym_trainers.megatron_learner import compat  # noqa: F401  (before megatron)
from relax_gym_trainers.megatron_learner.modules import grouped
from relax_gym_trainers.megatron_learner.modules.experts import GroupedExperts, unstacked, use_grouped
from relax_gym_trainers.megatron_learner.modules.grouped import grouped_linear
from relax_gym_trainers.megatron_learner.modules.pieces import Alone
from relax_gym_trainers.megatron_learner.parallel import Layout

from megatron.core import dist_checkpointing, parallel_state  # isort: skip
from megatron.core.dist_checkpointing.strategies import filesystem_async  # isort: skip
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # isort: skip
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # isort: skip
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # isort: skip
from megatron.core.transformer.spec_utils import ModuleSpec, build_module  # isort: skip

HIDDEN, WIDTH, EXPERTS = 16, 8, 4
COUNTS = [3, 0, 5, 1]


def config(**options: Any) -> Any:
    experts = {"num_moe_experts": EXPERTS, "moe_router_topk": 2, "moe_ffn_hidden_size": WIDTH}
    dispatch = {"moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": "none"}
    gated = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False}
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": 2, "ffn_hidden_size": 40}
    return transformer_config(**{**experts, **dispatch, **gated, **sizes, "moe_router_dtype": "fp32", **options})


def alone(**options: Any) -> GroupedExperts:
    groups = SimpleNamespace(ep=Alone(), expt_tp=Alone(), expt_dp=Alone())
    return GroupedExperts(EXPERTS, config(**options), pg_collection=groups)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("inner", [8, 6])
@pytest.mark.parametrize("counts", [COUNTS, [0, 0, 0, 0], [0, 0, 9, 0]])
def test_each_run_of_rows_is_multiplied_by_its_own_matrix(dtype: torch.dtype, inner: int, counts: list[int]) -> None:
    generator = torch.manual_seed(0)
    x = torch.randn(sum(counts), inner, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(EXPERTS, 16, inner, generator=generator).to(dtype).requires_grad_()
    assert grouped.has_kernel(x, weight) is (dtype != torch.float64 and inner * dtype.itemsize % 16 == 0)
    out = grouped_linear(x, weight, counts)
    upstream = torch.randn(out.shape, generator=generator).to(dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    wanted = torch.cat([run @ matrix.T for run, matrix in zip(exact[0].split(counts), exact[1], strict=True)])
    got = [out, *torch.autograd.grad(out, (x, weight), upstream)]
    close = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {"rtol": 1e-6, "atol": 1e-6}
    for a, b in zip(got, [wanted, *torch.autograd.grad(wanted, exact, upstream.double())], strict=True):
        torch.testing.assert_close(a.double(), b, **close)


def test_runs_that_are_not_all_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"9 rows and 4 matrices, but runs of \[3, 0, 5\] rows"):
        grouped_linear(torch.ones(9, 8), torch.ones(4, 8, 8), [3, 0, 5])


@pytest.mark.gpu
def test_experts_without_tokens_get_no_gradient_on_a_gpu() -> None:
    x = torch.randn(9, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(EXPERTS, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    assert grouped.has_kernel(x, weight)
    garbage = torch.full_like(weight, torch.nan)
    del garbage  # what is allocated next begins with it
    (grad,) = torch.autograd.grad(grouped_linear(x, weight, COUNTS).square().sum(), weight)
    assert grad[1].abs().sum() == 0
    assert grad.isfinite().all()


def layer(grouped_experts: bool, **options: Any) -> Any:
    """A layer of experts with weights that depend only on which expert they are of."""
    chosen = config(**options)
    mlp = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False).submodules.mlp
    if grouped_experts:
        use_grouped(mlp)
    made = build_module(mlp, chosen, layer_number=1) if isinstance(mlp, ModuleSpec) else mlp(chosen, layer_number=1)
    outer = torch.nn.Module()
    outer.mlp, outer.config = made, chosen
    with torch.no_grad():
        for name, parameter in unstacked(outer.named_parameters()):
            parameter.copy_(weights(name, parameter.shape))
    return outer


def weights(name: str, shape: torch.Size) -> Tensor:
    """This rank's part of one expert's matrix, or of the router."""
    if "local_experts" not in name:
        return torch.randn(shape, generator=torch.manual_seed(99))
    expert = int(name.split(".")[-3]) + parallel_state.get_expert_model_parallel_rank() * local_experts()
    ranks, rank = (
        parallel_state.get_expert_tensor_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_rank(),
    )
    first = "fc1" in name
    whole = torch.randn((2, WIDTH, HIDDEN) if first else (1, HIDDEN, WIDTH), generator=torch.manual_seed(expert))
    return torch.cat(list(whole.chunk(ranks, 1 if first else 2)[rank]))


def local_experts() -> int:
    return EXPERTS // parallel_state.get_expert_model_parallel_world_size()


def trained(layout: Layout, grouped_experts: bool, distributed: bool, options: dict[str, Any]) -> dict[str, Tensor]:
    """Output, gradients of the input and of all parameters, and the parameters after an optimizer's step.

    The gradients of a distributed optimizer are summed only where a rank steps with them: not compared.
    """
    module = layer(grouped_experts, **layout.megatron_options(), **options)
    wrapped = DistributedDataParallel(
        module.config, DistributedDataParallelConfig(use_distributed_optimizer=distributed), module
    )
    # A large epsilon, or the first step of Adam would make much of differences between gradients of almost 0.
    steps = {"optimizer": "adam", "lr": 0.01, "adam_eps": 0.01, "clip_grad": 0.5}
    settings = OptimizerConfig(**steps, use_distributed_optimizer=distributed)
    optimizer = get_megatron_optimizer(settings, [wrapped])
    wrapped.zero_grad_buffer()
    rank = torch.distributed.get_rank()
    x = torch.randn(6, 1, HIDDEN, generator=torch.manual_seed(10 + rank)).requires_grad_()
    out, _ = wrapped.module.mlp(x)
    out.backward(torch.randn(out.shape, generator=torch.manual_seed(20 + rank)))
    wrapped.finish_grad_sync()
    gradients = unstacked((name, parameter.main_grad) for name, parameter in module.named_parameters())
    found = {} if distributed else {f"gradient of {name}": part.clone() for name, part in gradients}
    _, norm, _ = optimizer.step()
    after = {name: part.clone() for name, part in unstacked(module.named_parameters())}
    return {"out": out.detach(), "gradient of x": x.grad, "norm": torch.tensor(norm), **found, **after}


def both(layout: Layout, options: dict[str, Any]) -> list[list[dict[str, Tensor]]]:
    return [[trained(layout, which, distributed, options) for which in (False, True)] for distributed in (False, True)]


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (Layout(), {}),
        (Layout(), {"bias_activation_fusion": True}),
        (Layout(dp=2, ep=2), {}),
        (Layout(dp=2), {}),
        (Layout(tp=2), {}),
        (Layout(tp=2, ep=2, etp=1), {}),
        (Layout(), {"activation_func": torch.nn.functional.gelu}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else f"tp{value.tp}dp{value.dp}ep{value.ep}etp{value.etp}",
)
def test_they_are_the_sequential_ones_through_a_whole_step(layout: Layout, options: dict[str, Any]) -> None:
    for plain, distributed in on_quiet_ranks(layout, both, options):
        for sequential, stacked in (plain, distributed):
            assert stacked.keys() == sequential.keys()
            for name, expected in sequential.items():  # sums of floats end where the processor's order of adding leads
                bound = 1e-6 * max(1.0, expected.abs().max().item())
                torch.testing.assert_close(stacked[name], expected, rtol=1e-6, atol=bound, msg=name)
        assert len(plain[0]) == 3 + 2 * (1 + 2 * EXPERTS // layout.ep)


def saved_and_loaded(layout: Layout, folder: Path) -> list[bool]:
    """Each kind's checkpoint read into the other kind, without the empty extra states of the sequential ones."""
    filesystem_async._results_queue = queue.Queue()  # or a process would be started for it
    options = layout.megatron_options()
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    equal = []
    for number, (one, other) in enumerate(((False, True), (True, False))):
        source, target = layer(one, **options), layer(other, **options)
        path = folder / f"{number}"
        path.mkdir(exist_ok=True)
        torch.distributed.barrier()
        dist_checkpointing.save(source.mlp.sharded_state_dict("mlp.", metadata=metadata), str(path))
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.fill_(torch.nan)
        wanted = target.mlp.sharded_state_dict("mlp.", metadata=metadata).items()
        wanted = {name: part for name, part in wanted if not name.endswith("_extra_state")}
        loaded = dist_checkpointing.load(wanted, str(path))
        target.mlp.load_state_dict({name.removeprefix("mlp."): tensor for name, tensor in loaded.items()}, strict=False)
        saved = dict(unstacked(source.named_parameters()))
        equal += [torch.equal(part, saved[name]) for name, part in unstacked(target.named_parameters())]
    return equal


@pytest.mark.parametrize("layout", [Layout(dp=2, ep=2), Layout(tp=2)], ids=["ep2", "etp2"])
def test_checkpoints_of_both_kinds_are_the_same(layout: Layout, tmp_path: Path) -> None:
    for equal in on_quiet_ranks(layout, saved_and_loaded, tmp_path):
        assert len(equal) == 2 * (1 + 2 * EXPERTS // layout.ep)
        assert all(equal)


def test_the_stacked_parameters_have_the_names_of_the_sequential_ones() -> None:
    outer = torch.nn.Module()
    outer.mlp = torch.nn.Module()
    outer.mlp.experts, outer.mlp.router = alone(), torch.nn.Linear(2, 2)
    parts = dict(unstacked(outer.named_parameters()))
    names = [f"mlp.experts.local_experts.{e}.linear_fc{i}.weight" for i in (1, 2) for e in range(EXPERTS)]
    assert [*parts] == [*names, "mlp.router.weight", "mlp.router.bias"]
    parts[names[1]].fill_(7.0)
    assert outer.mlp.experts.linear_fc1.weight[1].unique().tolist() == [7.0]
    weight = outer.mlp.experts.linear_fc2.weight
    assert (weight.allreduce, weight.partition_dim, weight.tensor_model_parallel) == (True, 2, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"add_bias_linear": True}, "do not support add_bias_linear = True; use the sequential ones"),
        ({"gated_linear_unit": False}, "do not support gated_linear_unit = False"),
        (
            {"moe_apply_probs_on_input": True, "moe_router_topk": 1, "moe_router_pre_softmax": True},
            "do not support moe_apply_probs_on_input = True",
        ),
    ],
)
def test_what_they_have_not_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        alone(**options)
