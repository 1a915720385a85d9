"""A bucket as a parcel that another process of this machine opens: a pickle that holds a handle, not the bytes.

SGLang's `SafeUnpickler` reads it and wants classes of its own in it; they are named here without importing sglang.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import pickle
import sys
from collections.abc import Callable, Collection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from relax_gym_plugins.samplers.sglang.weights.buckets import Bucket


class _Foreign:
    """A global of SGLang's, which this process need not have."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __call__(self, *args: Any) -> Any:
        raise TypeError(f"{self.module}.{self.name} can only be pickled here")


METADATA = _Foreign("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata")
REBUILD_CUDA = _Foreign("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified")
DEVICE = 6  # in the arguments of torch's rebuild_cuda_tensor; SGLang's version takes the device's uuid instead
COUNTER = slice(11, 13)  # in the same: file and offset of the count of readers
FILE_HEADER = 64  # bytes before the content of a file of torch's in shared memory


class _Call:
    """Pickled as a call of a foreign global."""

    def __init__(self, function: _Foreign, *args: Any) -> None:
        self.reduced = (function, args)


class _Pickler(pickle._Pickler):
    """The pure Python pickler, as the one in C imports what it names."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _Call):
            return obj.reduced
        if isinstance(obj, _Foreign):
            return obj.name
        if isinstance(obj, torch.UntypedStorage):
            return _reduce_storage(obj)
        reduce: Callable[[Any], Any] | None = ForkingPickler._extra_reducers.get(type(obj))  # type: ignore[attr-defined]
        return NotImplemented if reduce is None else reduce(obj)

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if not isinstance(obj, _Foreign):
            super().save_global(obj, name)  # type: ignore[misc]
            return
        self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())  # type: ignore[attr-defined]
        self.memoize(obj)  # type: ignore[attr-defined]


def _reduce_storage(storage: torch.UntypedStorage) -> Any:
    """By the name of a shared file. Torch's default, passing descriptors, works only among processes with one ancestor
    and kills the server; this is its `file_system` strategy, which is otherwise a setting of the whole process."""
    manager, name, nbytes = storage._share_filename_cpu_()
    storage._shared_incref()  # type: ignore[no-untyped-call]
    return reductions.rebuild_storage_filename, (torch.UntypedStorage, manager, name, nbytes)


class Parcel:
    """A packed bucket. `label` makes one address for one reader's process; `free` when all have answered.

    On CPU the bytes lie in a file of /dev/shm, on CUDA in memory of `device` whose IPC handle is passed.
    """

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        self._slots = bucket.slots
        self._counters: list[tuple[object, bytes, int]] = []
        self._file: str | None = None
        if device.type == "cuda":
            flat = torch.empty(bucket.nbytes, dtype=torch.uint8, device=device)
        else:
            storage = torch.UntypedStorage._new_using_filename_cpu(bucket.nbytes)
            self._file = storage._share_filename_cpu_()[1].decode()
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
        self._flat: Tensor | None = bucket.pack(flat)

    def label(self, reader: object) -> str:
        """A pickle that `reader` opens once, in base64."""
        metadata = [
            _Call(METADATA, slot.name, slot.shape, slot.dtype, slot.start, slot.end, slot.end - slot.start)
            for slot in self._slots
        ]
        assert self._flat is not None
        content = {"flattened_tensor": self._address(self._flat, reader), "metadata": metadata}
        buffer = io.BytesIO()
        _Pickler(buffer, protocol=4).dump(content)
        return base64.b64encode(buffer.getvalue()).decode()

    def _address(self, flat: Tensor, reader: object) -> Any:
        if not flat.is_cuda:
            return flat
        with torch.cuda.device(flat.device):  # this may be a new thread, whose device is 0
            args = list(reductions.reduce_tensor(flat)[1])  # type: ignore[no-untyped-call]
        self._counters.append((reader, *args[COUNTER]))
        args[DEVICE] = str(torch.cuda.get_device_properties(flat.device).uuid)  # ordinals differ between processes
        return _Call(REBUILD_CUDA, *args)

    def free(self, lost: Collection[object]) -> None:
        """Give the memory back.

        Readers that have let go of the bucket are counted by torch, so memory that one still reads is not used again
        until it has. `lost` are those that may never open theirs, and that nobody waits for.
        """
        device = None if self._flat is None else self._flat.device
        if device is not None and device.type == "cuda":
            for reader, handle, offset in self._counters:
                if reader in lost and _count(handle, offset) > 0:
                    torch.UntypedStorage._release_ipc_counter_cuda(handle, offset)
        self._flat = None
        if device is not None and device.type == "cuda":
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        if lost and self._file is not None:
            with contextlib.suppress(FileNotFoundError):  # everyone has read it after all
                os.unlink(f"/dev/shm{self._file}")


def _count(handle: bytes, offset: int) -> int:
    """Readers that torch waits for. Below 0, which it takes for many, memory would be kept for ever."""
    with open(f"/dev/shm{handle.decode()}", "rb") as counters:
        counters.seek(FILE_HEADER + 8 * offset)
        return int.from_bytes(counters.read(8), sys.byteorder, signed=True)
