"""Files that safetensors reads."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from relax_gym_trainers.tensor_files import DTYPES, write_tensors


def test_tensors_of_every_kind_come_back(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.arange(-3.0, 3.0).to(dtype).reshape(2, 3) for dtype in DTYPES}
    tensors |= {"none": torch.zeros(0, 4), "one": torch.tensor(1.5), "ü": torch.ones(3, dtype=torch.int8)}
    write_tensors(tmp_path / "x.safetensors", tensors, {"format": "pt"})
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
