"""Run by every Python process that has this folder on its path: SGLang's servers on machines without a GPU, for tests.

SGLang imports `triton` for kernels that a CPU never runs, and torchvision's compiled operators do not load beside a CPU
build of torch. Both imports are made to work; nothing of SGLang itself is changed.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import sys
from pathlib import Path
from typing import Any

KERNEL_LIBRARY: dict[str, tuple[str, ...]] = {
    "triton.language": (),
    "triton.language.extra": (),
    "triton.language.extra.libdevice": (),
    "triton.runtime": (),
    "triton.runtime.jit": ("JITFunction", "KernelInterface"),
    "triton.runtime.cache": (),
    "triton.runtime.driver": (),
    "triton.runtime.autotuner": (),
    "triton.compiler": ("CompiledKernel",),
    "triton.compiler.compiler": ("ASTSource",),
    "triton.testing": (),
    "triton.tools": (),
    "triton.tools.tensor_descriptor": (),
    "triton.backends": (),
    "triton.backends.compiler": ("GPUTarget",),
}
"""Modules SGLang imports and the classes it looks up in them."""


class Constexpr:
    """Annotates arguments of kernels."""

    def __init__(self, value: object = None) -> None:
        self.value = value


def install_triton() -> None:
    """The stand-in that SGLang itself ships for Macs, with the submodules it looks up elsewhere."""
    places = (Path(folder) / "sglang/_platform_stubs.py" for folder in sys.path)
    source = next((path for path in places if path.exists()), None)
    if source is None or importlib.util.find_spec("triton") is not None:
        return
    spec = importlib.util.spec_from_file_location("_sglang_platform_stubs", source)
    assert spec is not None and spec.loader is not None
    stubs: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = stubs
    spec.loader.exec_module(stubs)
    sys.meta_path.insert(0, stubs._TritonFinder())
    triton = stubs._make_mock("triton")
    triton.__version__, triton.Config = "3.0.0", stubs._Config
    triton.cdiv, triton.next_power_of_2 = stubs._cdiv, stubs._next_power_of_2
    for name, classes in KERNEL_LIBRARY.items():
        module = stubs._make_mock(name)
        parent, _, child = name.rpartition(".")
        setattr(sys.modules[parent], child, module)
        for class_name in classes:
            setattr(module, class_name, type(class_name, (stubs._StubBase,), {}))
    sys.modules["triton.language"].constexpr = Constexpr  # type: ignore[attr-defined]
    for name in ("triton.runtime.cache", "triton.compiler.compiler"):
        sys.modules[name].triton_key = stubs._triton_key  # type: ignore[attr-defined]
    for error in ("OutOfResources", "PTXASError"):
        setattr(sys.modules["triton.runtime.autotuner"], error, type(error, (Exception,), {}))


class BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Declares the operators without which `import torchvision` fails. Its transforms in Python are then usable."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name != "torchvision" or name in sys.modules:
            return
        import torch

        if torch.version.cuda is None:
            for operator in ("nms", "qnms"):
                with contextlib.suppress(RuntimeError):  # it is there already
                    torch.library.define(
                        f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                    )


install_triton()
sys.meta_path.insert(0, BeforeTorchvision())
