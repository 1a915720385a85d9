"""Functions that are compiled on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from relax_gym_trainers.fused import fused


class OnGpu(torch.Tensor):
    """Says so."""

    is_cuda = True


def test_rows_of_any_number_are_compiled_for_once_and_a_lone_one_never(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, calls = [], []

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        graphs.append(function)

        def call(rows: torch.Tensor) -> Any:
            calls.append(len(rows))
            return function(rows)

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    double = fused(lambda rows: rows * 2)
    for number in (3, 1, 0, 2):
        assert double(torch.ones(number, 4).as_subclass(OnGpu)).tolist() == [[2.0] * 4] * number
    assert (len(graphs), calls) == (1, [3, 2])
    double(torch.ones(5, 4))
    assert calls == [3, 2]


def test_a_compiler_begins_again_for_a_lone_row() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    double = torch.compile(lambda rows: rows * 2, backend=backend)
    with torch.compiler.set_stance("default"):  # a Megatron learner on a CPU has it run eagerly
        for number in (3, 2, 7, 1):
            rows = torch.ones(number, 4)
            torch._dynamo.maybe_mark_dynamic(rows, 0)
            assert double(rows).tolist() == [[2.0] * 4] * number
    assert len(graphs) == 2  # when it is one, `fused` need not look at the number
