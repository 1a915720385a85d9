"""Megatron code on a machine without CUDA."""

from __future__ import annotations

import threading

import pytest
import torch
from megatron_kit import on_ranks

from relax_gym_trainers.megatron_learner import compat
from relax_gym_trainers.megatron_learner.parallel import Layout

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-ins are for machines without CUDA")


def look(layout: Layout) -> dict[str, object]:
    compat.prepare()  # a second time
    plain = torch.zeros(2)
    return {
        "factory": torch.zeros(2, device="cuda").device.type,
        "index": torch.zeros(2, device="cuda:1").device.type,
        "cuda": plain.cuda() is plain,
        "to": plain.to("cuda").device.type,
        "pinned": torch.zeros(2, pin_memory=True).device.type,
        "type": plain.type(),
        "half": plain.bfloat16().type(),
        "cast": plain.type(torch.int64).dtype,
        "current": str(torch.cuda.current_device()),
        "compiled": torch.compile(lambda x: x + 1)(plain).tolist(),
    }


def test_devices_named_cuda_are_the_cpu() -> None:
    assert on_ranks(Layout(), look) == [
        {
            "factory": "cpu",
            "index": "cpu",
            "cuda": True,
            "to": "cpu",
            "pinned": "cpu",
            "type": "torch.cuda.FloatTensor",
            "half": "torch.cuda.BFloat16Tensor",
            "cast": torch.int64,
            "current": "cpu",
            "compiled": [1.0, 1.0],
        }
    ]


def look_from_a_thread(layout: Layout) -> list[str]:
    seen: list[str] = []

    def visit() -> None:
        try:
            torch.zeros(1, device="cuda")
        except Exception as error:
            seen.append(type(error).__name__)
        compat.prepare()
        seen.append(torch.zeros(1, device="cuda").device.type)

    thread = threading.Thread(target=visit)
    thread.start()
    thread.join()
    return seen


def test_each_thread_prepares_itself() -> None:
    assert on_ranks(Layout(), look_from_a_thread)[0][-1] == "cpu"
    assert len(on_ranks(Layout(), look_from_a_thread)[0]) == 2


def draw(layout: Layout) -> dict[str, list[float]]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.manual_seed(5)
    tracker = get_cuda_rng_tracker()
    with tracker.fork():
        first = torch.rand(3).tolist()
    outside = torch.rand(3).tolist()
    with tracker.fork():
        second = torch.rand(3).tolist()
    missing = pytest.raises(ValueError, match="no random stream 'other'; streams: data-parallel-rng")
    with missing, tracker.fork("other"):
        pass
    return {"first": first, "second": second, "outside": outside}


def test_each_tensor_parallel_rank_has_its_own_random_stream() -> None:
    one, two = on_ranks(Layout(tp=2), draw)
    torch.manual_seed(5)
    assert one["outside"] == two["outside"] == torch.rand(3).tolist()
    assert one["first"] != two["first"]
    assert one["second"] != one["first"]


def recompute(layout: Layout) -> bool:
    from megatron.core.tensor_parallel import checkpoint, get_cuda_rng_tracker

    def noisy(x: torch.Tensor) -> torch.Tensor:
        with get_cuda_rng_tracker().fork():
            return torch.nn.functional.dropout(x, 0.5, training=True)

    x = torch.ones(64, requires_grad=True)
    y = checkpoint(noisy, False, x)
    y.sum().backward()
    return bool(torch.equal(x.grad, y.detach()))


def test_recomputing_draws_the_same_random_numbers() -> None:
    assert on_ranks(Layout(), recompute) == [True]


def gather_unequal(layout: Layout) -> tuple[list[float], list[float]]:
    from megatron.core.parallel_state import get_tensor_model_parallel_group
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region as gather

    group = get_tensor_model_parallel_group()
    mine = torch.full((group.rank() + 1, 1), 1.0 + group.rank(), requires_grad=True)
    whole = gather(mine, group=group, output_split_sizes=[1, 2])
    (whole * torch.tensor([[1.0], [2.0], [3.0]])).sum().backward()
    assert mine.grad is not None
    return whole.flatten().tolist(), mine.grad.flatten().tolist()


def test_ranks_gather_unequal_numbers_of_tokens() -> None:
    one, two = on_ranks(Layout(tp=2), gather_unequal)
    assert one == ([1.0, 2.0, 2.0], [2.0])
    assert two == ([1.0, 2.0, 2.0], [4.0, 6.0])


def test_this_process_is_left_alone() -> None:
    with compat.prepared():
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        with compat.prepared():
            pass
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1).type() == "torch.FloatTensor"
