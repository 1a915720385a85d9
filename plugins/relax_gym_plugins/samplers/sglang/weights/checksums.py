"""Whether servers hold the very bytes that were sent, by checksums of `/weights_checker` as 0.5.23 computes them."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from relax_gym.errors import SamplerError
from relax_gym.sampler import Weights
from relax_gym_plugins.samplers.sglang.weights.base import Server
from relax_gym_plugins.samplers.sglang.weights.buckets import cast

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
VOCABULARY = re.compile(r"(^|\.)(embed_tokens|lm_head)\.weight$")
VOCABULARY_MULTIPLE = 64
"""SGLang pads the rows of the vocabulary with zeros to a multiple of this."""


class Checked:
    """Weights that are passed on while their checksums are taken; `verify` once they were sent.

    What is compared with the learner: every tensor that a server has under the same name, those that it fuses
    (q, k, v and gate, up; in this order) and those whose vocabulary it pads. What is not: experts of a mixture, which
    it stacks in a layout of its own, buffers, and tensors of servers that split them (`tp_size` above 1). Servers with
    the same `tp_size` are always compared with each other.
    """

    def __init__(self, weights: Weights, dtype: torch.dtype | None = None, *, gpu: bool = False) -> None:
        """
        Args:
            dtype: the servers'; None means that of the weights.
            gpu: whether the servers run on GPUs, where SGLang takes another checksum.
        """
        self._weights, self._dtype = weights, dtype
        self._checksum = gpu_checksum if gpu else cpu_checksum
        self._parts: dict[str, dict[str, Tensor]] = {}
        self._sums: dict[str, set[str]] = {}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._weights:
            self._take(name, tensor.detach().to(cast(tensor, self._dtype)))
            yield name, tensor
        self._parts.clear()

    def _take(self, name: str, tensor: Tensor) -> None:
        self._add(name, tensor)
        if VOCABULARY.search(name) and (missing := -len(tensor) % VOCABULARY_MULTIPLE):
            self._add(name, tensor, tensor.new_zeros(missing, *tensor.shape[1:]))
        for whole, parts in FUSED.items():
            for part in parts:
                if f".{part}." in name:
                    fused = name.replace(f".{part}.", f".{whole}.")
                    held = self._parts.setdefault(fused, {})
                    held[part] = tensor
                    if len(held) == len(parts):
                        self._add(fused, *(held[each] for each in parts))
                        del self._parts[fused]

    def _add(self, name: str, *tensors: Tensor) -> None:
        self._sums.setdefault(name, set()).add(self._checksum(*tensors))

    async def verify(self, servers: Sequence[Server], *, timeout: float = 120.0) -> dict[Server, SamplerError]:
        """Ask all servers; those that do not hold what was sent, that differ from most, or that cannot say."""
        calls = (server.post("/weights_checker", {"action": "checksum"}, timeout=timeout) for server in servers)
        failed: dict[Server, SamplerError] = {}
        whole: dict[Server, str] = {}
        for server, reply in zip(servers, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(reply, SamplerError):
                failed[server] = reply
            elif isinstance(reply, BaseException):
                raise reply
            elif wrong := self._wrong(server, reply):
                failed[server] = SamplerError(
                    f"{server.url} does not hold the weights that were sent: {len(wrong)} tensors differ, "
                    f"{', '.join(wrong[:3])} among them; does it keep them in another dtype?"
                )
            else:
                whole[server] = str(reply.get("per_engine_checksum"))
        return failed | _outliers(whole)

    def _wrong(self, server: Server, reply: Mapping[str, Any]) -> list[str]:
        ranks = reply.get("ranks") or []
        if server.tp_size > 1 or len(ranks) != 1:
            return []
        theirs: Mapping[str, str] = ranks[0]["checksums"]
        return [name for name in theirs if name in self._sums and theirs[name] not in self._sums[name]]


def _outliers(whole: Mapping[Server, str]) -> dict[Server, SamplerError]:
    """Servers that hold something else than most of those that are split as they are."""
    failed = {}
    for size in {server.tp_size for server in whole}:
        alike = {server: value for server, value in whole.items() if server.tp_size == size}
        most, _ = Counter(alike.values()).most_common(1)[0]
        for server, value in alike.items():
            if value != most:
                failed[server] = SamplerError(
                    f"{server.url} holds other weights than most servers: checksum {value} where they have {most}"
                )
    return failed


def cpu_checksum(*tensors: Tensor) -> str:
    """Of tensors one after the other: the first 8 bytes of SHA-256."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(_bytes(tensor).cpu().numpy().data)
    return total.hexdigest()[:16]


WORD = 0xFFFFFFFF
TILE, TILES = 8192, 128
SEEDS = (0x243F6A88, (0x243F6A88 * 0x9E3779B1 ^ 0xDEADBEEF) & WORD)
POSITION, TURNS = (0x27D4EB2D, 0x165667B1), (15, 13)


@torch.no_grad()
def gpu_checksum(*tensors: Tensor) -> str:
    """Of tensors one after the other, on whatever device they are: the numbers of SGLang's `gpu_tensor_hash`.

    Each 32-bit word is mixed with its position, twice; sums of 8,192 are mixed again, and their sum at the end.
    """
    flat = _bytes(tensors[0]) if len(tensors) == 1 else torch.cat([_bytes(tensor) for tensor in tensors])
    words = torch.nn.functional.pad(flat, (0, -flat.numel() % 4)).view(torch.int32)
    total = 0
    for start in range(0, words.numel(), TILE * TILES):
        part = words[start : start + TILE * TILES].long() & WORD
        at = torch.arange(start, start + part.numel(), device=part.device)
        halves = []
        for seed, factor, turn in zip(SEEDS, POSITION, TURNS, strict=True):
            mixed = _mix(part ^ ((at * factor + seed) & WORD) ^ ((at << turn | at >> (32 - turn)) & WORD))
            sums = torch.nn.functional.pad(mixed, (0, -mixed.numel() % TILE)).view(-1, TILE).sum(1) & WORD
            halves.append(_mix(sums ^ (words.numel() * 4 & WORD)))
        total += int((halves[0] << 32 | halves[1]).sum())  # modulo 2**64, as the last step takes it
    return f"{_finish(total) if words.numel() else 0:016x}"


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _mix(x: Tensor) -> Tensor:
    """MurmurHash3's last step of 32 bits, in 64 whose upper half is dropped."""
    x = (x ^ x >> 16) * 0x85EBCA6B & WORD
    x = (x ^ x >> 13) * 0xC2B2AE35 & WORD
    return x ^ x >> 16


def _finish(x: int) -> int:
    """SplitMix64's last step."""
    whole = (1 << 64) - 1
    x &= whole
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & whole
    x = (x ^ x >> 27) * 0x94D049BB133111EB & whole
    return x ^ x >> 31
