"""Options that save memory do so: what is computed again, and how much of the logits exists at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_cases import random_batch
from megatron_learner_kit import Case, Folders, on_ranks, rank_learner

from relax_gym_trainers.megatron_learner.modules import mlp
from relax_gym_trainers.megatron_learner.modules.attention import CoreAttention
from relax_gym_trainers.megatron_learner.parallel import Layout
from relax_gym_trainers.megatron_learner.rank_service import Place
from relax_gym_trainers.torch_learner import logprobs

from megatron.core.transformer.transformer_layer import TransformerLayer  # isort: skip

pytest_plugins = ["megatron_fixtures"]
pytestmark = pytest.mark.usefixtures("one_thread")


def counting(counts: Counter[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which counts how often it is called."""

    def counted(*args: Any, **options: Any) -> Any:
        counts[name] += 1
        return function(*args, **options)

    return counted


def computed(layout: Layout, place: Place, folder: Path) -> dict[str, Counter[str]]:
    """How often layers and what is in them are computed in a step of one micro-batch, by `recompute`."""
    found: dict[str, Counter[str]] = {}
    for number, recompute in enumerate(("none", "selective", "full")):
        case = Case(options={"recompute": recompute, "micro_batch_tokens": 4096})
        trainer, counts = rank_learner(layout, place, number, folder, case), Counter[str]()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mlp, "_activate", counting(counts, "activations", mlp._activate))
            for kind, name in ((TransformerLayer, "layers"), (CoreAttention, "attentions")):
                patch.setattr(kind, "forward", counting(counts, name, kind.forward))
            trainer.step(random_batch())
        trainer.close()
        found[recompute] = counts
    return found


def test_what_is_not_kept_is_computed_twice(folders: Folders) -> None:
    assert on_ranks(Layout(), computed, folders["dense"]) == [
        {
            "none": {"layers": 2, "attentions": 2, "activations": 2},
            "selective": {"layers": 2, "attentions": 2, "activations": 4},
            "full": {"layers": 4, "attentions": 4, "activations": 4},
        }
    ]


def logits(layout: Layout, place: Place, folder: Path) -> set[tuple[int, torch.dtype]]:
    """Rows and precision of the products of hidden states and head in a step."""
    case = Case(options={"logprob_chunk": 7, "dtype": "bfloat16", "micro_batch_tokens": 4096})
    trainer, found = rank_learner(layout, place, 0, folder, case), set()

    def noted(hidden: torch.Tensor, *args: Any, own: Callable[..., torch.Tensor] = logprobs.linear) -> torch.Tensor:
        out = own(hidden, *args)
        found.add((len(out), out.dtype))
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "linear", noted)
        trainer.step(random_batch())
    trainer.close()
    return found


def test_logits_of_a_chunk_of_trained_tokens_exist_at_a_time_in_the_precision_of_the_arithmetic(
    folders: Folders,
) -> None:
    last = random_batch().trained_tokens % 7
    assert last
    assert on_ranks(Layout(), logits, folders["dense"]) == [{(7, torch.bfloat16), (last, torch.bfloat16)}]
