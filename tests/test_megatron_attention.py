"""Attention for Megatron against a float64 reference: packed, padded, grouped queries, context parallel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_modules_kit import on_quiet_ranks, transformer_config
from torch import Tensor

from relax_gym.errors import ConfigError
from relax_gym_trainers.megatron_learner import compat  # noqa: F401  (before megatron)
from relax_gym_trainers.megatron_learner.modules import flash
from relax_gym_trainers.megatron_learner.modules.attention import CoreAttention
from relax_gym_trainers.megatron_learner.modules.pieces import Alone, Pieces
from relax_gym_trainers.megatron_learner.parallel import Layout

from megatron.core import parallel_state  # isort: skip
from megatron.core.packed_seq_params import PackedSeqParams  # isort: skip
from megatron.core.transformer.enums import AttnMaskType  # isort: skip

HEADS, GROUPS, SIZE = 4, 2, 8
LENGTHS = [3, 1, 9, 0, 5]
"""Two rows are shorter than 2 · cp = 4."""


def attention(group: Any, *, scale: float | None = None, causal: Any = AttnMaskType.causal, **options: Any) -> Any:
    sizes = {"hidden_size": HEADS * SIZE, "num_attention_heads": HEADS, "num_query_groups": GROUPS}
    config = transformer_config(**{**sizes, **options})
    kind = options.get("attention_type", "self")
    return CoreAttention(
        config=config,
        layer_number=1,
        attn_mask_type=causal,
        attention_type=kind,
        cp_comm_type="p2p",
        softmax_scale=scale,
        pg_collection=SimpleNamespace(cp=group),
    )


def reference(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """One row, [t, heads, d] each, in float64 by hand."""
    key, value = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    later = torch.ones(len(query), len(key), dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), value)


def rows(multiple: int) -> tuple[list[Tensor], Tensor, list[int]]:
    """Queries, keys and values of a pack with rows padded to `multiple`, which of its tokens are real, and lengths."""
    padded = [-(-length // multiple) * multiple for length in LENGTHS]
    real = torch.cat([torch.arange(size) < length for size, length in zip(padded, LENGTHS, strict=True)])
    generator = torch.manual_seed(0)
    shapes = [(sum(padded), heads, SIZE) for heads in (HEADS, GROUPS, GROUPS)]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes], real, padded


def expected(inputs: list[Tensor], real: Tensor, scale: float) -> list[Tensor]:
    """Output, 0 at padding, and gradients of its weighted sum, as without any padding."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    parts = zip(*(x[real].split(LENGTHS) for x in leaves), strict=True)
    out = torch.zeros(leaves[0].shape, dtype=torch.float64)
    out[real] = torch.cat([reference(*part, scale) for part in parts])
    return [out, *torch.autograd.grad(out, leaves, weights(out, real))]


def weights(out: Tensor, real: Tensor) -> Tensor:
    """A gradient for each output, 0 at padding."""
    return torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape) * real[:, None, None]


def pack(padded: list[int]) -> PackedSeqParams:
    def starts(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    real, all_tokens = starts(LENGTHS), starts(padded)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=real,
        cu_seqlens_kv=real,
        cu_seqlens_q_padded=all_tokens,
        cu_seqlens_kv_padded=all_tokens,
        max_seqlen_q=max(padded),
        max_seqlen_kv=max(padded),
    )


def zigzag(x: Tensor, lengths: list[int], group: Any) -> Tensor:
    """This rank's chunks of each row."""
    pieces = [row.chunk(2 * group.size()) for row in x.split([length for length in lengths if length])]
    second = 2 * group.size() - 1 - group.rank()
    return torch.cat([part for piece in pieces for part in (piece[group.rank()], piece[second])])


def packed_difference(multiple: int, dtype: torch.dtype, scale: float | None, group: Any) -> float:
    """The largest difference of output and gradients on this rank from the reference."""
    inputs, real, padded = rows(multiple)
    wanted = expected(inputs, real, SIZE**-0.5 if scale is None else scale)
    upstream = weights(wanted[0], real)
    if group.size() > 1:
        mine = [zigzag(x, padded, group) for x in (*inputs, *wanted, upstream, real)]
        inputs, wanted, upstream, real = mine[:3], mine[3:7], mine[7], mine[8]
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    out = attention(group, scale=scale)(*leaves, packed_seq_params=pack(padded))
    assert out.shape == leaves[0].shape
    assert out.isfinite().all()
    got = [out.detach() * real[:, None, None], *torch.autograd.grad(out, leaves, upstream.to(dtype))]
    return max((a.double() - b).abs().max().item() for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("multiple", [1, 4])
def test_packed_rows_see_only_themselves_and_no_padding(
    multiple: int, dtype: torch.dtype, limit: float, scale: float | None
) -> None:
    assert packed_difference(multiple, dtype, scale, Alone()) < limit


def padded_difference(group: Any) -> float:
    generator, shape = torch.manual_seed(1), (8, 3, HEADS, SIZE)
    whole = [torch.randn(*shape[:2], heads, SIZE, generator=generator) for heads in (HEADS, GROUPS, GROUPS)]
    upstream = torch.randn(*shape, generator=generator)
    exact = [x.double().requires_grad_() for x in whole]
    wanted = torch.stack([reference(*(x[:, i] for x in exact), SIZE**-0.5) for i in range(3)], 1)
    gradients = torch.autograd.grad(wanted, exact, upstream.double())
    if group.size() > 1:
        whole = [zigzag(x, [8], group) for x in whole]
        gradients = [zigzag(x, [8], group) for x in gradients]
        wanted, upstream = zigzag(wanted, [8], group), zigzag(upstream, [8], group)
    leaves = [x.requires_grad_() for x in whole]
    out = attention(group)(
        *leaves, None, attn_mask_type=AttnMaskType.causal, attention_bias=None, packed_seq_params=None
    )
    assert out.shape == (len(upstream), 3, HEADS * SIZE)
    got = [out.view_as(upstream).detach(), *torch.autograd.grad(out, leaves, upstream.flatten(2))]
    return max((a.double() - b).abs().max().item() for a, b in zip(got, [wanted.detach(), *gradients], strict=True))


def test_padded_rows_see_only_themselves() -> None:
    assert padded_difference(Alone()) < 1e-5


def differences(layout: Layout) -> list[float]:
    group = parallel_state.get_context_parallel_group()
    found = [packed_difference(multiple, torch.float32, None, group) for multiple in (4, 8)]
    return [*found, packed_difference(4, torch.float64, 0.7, group), padded_difference(group)]


def test_context_parallel_ranks_give_what_one_does() -> None:
    for found in on_quiet_ranks(Layout(cp=2), differences):
        assert max(found) < 1e-5
        assert found[2] < 1e-12


def test_the_pieces_of_a_pack_are_found_once() -> None:
    packed = pack(LENGTHS)
    inputs, _, _ = rows(1)
    attention(Alone())(*inputs, packed_seq_params=packed)
    (kept,) = vars(packed)["pieces"].values()
    packed.cu_seqlens_q_padded = None
    attention(Alone())(*inputs, packed_seq_params=packed)
    assert [*vars(packed)["pieces"].values()] == [kept]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_dropout": 0.1}, "layer 1: .* attention_dropout = 0.1: set it to 0"),
        ({"window_size": (4, 0)}, "use a model without sliding windows"),
        ({"softmax_type": "off-by-one"}, "'off-by-one': use a model without attention sinks"),
        ({"apply_query_key_layer_scaling": True}, "apply_query_key_layer_scaling = True: set it to False"),
        ({"causal": AttnMaskType.no_mask}, "give causal or padding_causal"),
    ],
)
def test_what_it_has_not_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        attention(Alone(), **options)


def test_masks_and_rows_that_do_not_fit_are_refused() -> None:
    inputs, _, _ = rows(1)
    with pytest.raises(ValueError, match="give no attention_mask"):
        attention(Alone())(*inputs, torch.ones(1, dtype=torch.bool), packed_seq_params=pack(LENGTHS))
    with pytest.raises(ValueError, match="rows of 18 tokens in all, but 1 ranks have 17 each; pad the last row"):
        attention(Alone())(*(x[:-1] for x in inputs), packed_seq_params=pack(LENGTHS))


def uneven(layout: Layout) -> str:
    inputs, _, _ = rows(2)
    with pytest.raises(ValueError) as caught:
        attention(parallel_state.get_context_parallel_group())(
            *(x[: len(x) // 2] for x in inputs), packed_seq_params=pack([-(-length // 2) * 2 for length in LENGTHS])
        )
    return str(caught.value)


def test_rows_that_the_ranks_cannot_share_are_refused() -> None:
    assert on_quiet_ranks(Layout(cp=2), uneven) == ["a row of 2 tokens: pad it to a multiple of 2 · cp = 4"] * 2


def by_hand(query: Tensor, key: Tensor, value: Tensor, starts: tuple[Tensor, Tensor], scale: float | None) -> Tensor:
    """What the flash kernel does: the queries of a run are the last of its keys."""
    queries, keys = (begins.diff().tolist() for begins in starts)
    out = []
    for q, k, v in zip(query.split(queries), key.split(keys), value.split(keys), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or SIZE**-0.5)
        later = torch.ones(len(q), len(k), dtype=torch.bool).triu(1 + len(k) - len(q))
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), v))
    return torch.cat(out)


def on_a_cpu(query, key, value, query_starts, key_starts, *rest, scale=None):
    """torch's flash operator, forward."""
    assert rest[2:] == (0.0, True, False)  # no dropout, causal, no mask for debugging
    each = query.shape[1] // key.shape[1]
    shared = (x.repeat_interleave(each, 1) for x in (key, value))
    out = by_hand(query, *shared, (query_starts, key_starts), scale)
    return out, *[torch.zeros(0)] * 4


def back_on_a_cpu(grad, query, key, value, out, normaliser, query_starts, key_starts, *rest, scale=None):
    """The same, backward."""
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    with torch.enable_grad():
        again = on_a_cpu(*leaves, query_starts, key_starts, *rest[:4], False, scale=scale)[0]
    return torch.autograd.grad(again, leaves, grad)


class Rank:
    """One rank of two."""

    def __init__(self, number: int) -> None:
        self.rank, self.size = (lambda: number), (lambda: 2)


def test_rows_of_any_length_go_to_the_flash_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "_forward", on_a_cpu)
    monkeypatch.setattr(flash, "_backward", back_on_a_cpu)
    inputs, real, padded = rows(4)
    whole, *grads = expected(inputs, real, SIZE**-0.5)
    alone = Pieces.of(padded, len(real), Alone(), real.device)
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = flash.attend_packed(*leaves, alone, None)
    torch.testing.assert_close(out[real], whole[real])
    for got, wanted in zip(torch.autograd.grad(out, leaves, weights(whole, real)), grads, strict=True):
        torch.testing.assert_close(got, wanted)
    for number in range(2):
        pieces = Pieces.of(padded, len(real) // 2, Rank(number), real.device)
        gathered = [torch.cat([zigzag(x, padded, Rank(rank)) for rank in range(2)]) for x in inputs[1:]]
        keys = [x[pieces.order] for x in gathered]
        out = flash.attend_packed(zigzag(inputs[0], padded, Rank(number)), *keys, pieces, None)
        mine = zigzag(real, padded, Rank(number))
        torch.testing.assert_close(out[mine], zigzag(whole, padded, Rank(number))[mine])


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128])
def test_the_flash_kernel_gives_what_the_reference_does(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_megatron_attention.SIZE", size)
    inputs, real, padded = rows(4)
    wanted = expected(inputs, real, size**-0.5)
    leaves = [x.to("cuda", torch.bfloat16).requires_grad_() for x in inputs]
    assert flash.can_attend_packed(*leaves)
    out = attention(Alone())(*leaves, packed_seq_params=pack(padded))
    upstream = weights(wanted[0], real).to(out)
    got = [out.detach().cpu() * real[:, None, None], *torch.autograd.grad(out, leaves, upstream)]
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=0.05, atol=0.05)
