"""Draws every policy loss and its gradient against the ratio r = π/π_old, with the functions that train.

    python benchmarks/plot_losses.py

Writes docs/losses.png. Solid: A = 1, dashed: A = -1. The lower row is the gradient that reaches a token's log-prob:
where it is 0, nothing is learned.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from relax_gym.algorithm import TrainedTokens
from relax_gym.plugins import plugins

ROOT = Path(__file__).parent.parent
PANELS: list[tuple[str, list[tuple[str, str, dict[str, Any]]]]] = [
    (
        "hard clip",
        [
            ("grpo, dr_grpo, reinforce_pp", "grpo", {}),
            ("dapo", "dapo", {}),
            ("dapo, dual_clip = 1.6", "dapo", {"dual_clip": 1.6}),
        ],
    ),
    (
        "sequence ratio",
        [
            ("gspo, gspo_token", "gspo", {}),
            ("gspo, clip 0.2 / 0.2", "gspo", {"clip_low": 0.2, "clip_high": 0.2}),
        ],
    ),
    ("soft gate", [("sapo", "sapo", {}), ("sapo, tau = 4", "sapo", {"tau_positive": 4.0, "tau_negative": 4.0})]),
    (
        "weighted likelihood",
        [
            ("cispo", "cispo", {}),
            ("cispo, clip 0.2 / 0.28", "cispo", {"clip_low": 0.2, "clip_high": 0.28}),
            ("rloo, sft (A = 1)", "rloo", {}),
        ],
    ),
]


def curve(name: str, options: dict[str, Any], ratio: Tensor, advantage: float) -> tuple[Tensor, Tensor]:
    """Loss and d loss / dℓ of one-token samples whose old log-prob is -1."""
    old = torch.full_like(ratio, -1.0)
    logprobs = (ratio.log() + old).requires_grad_()
    tokens = TrainedTokens(
        logprobs=logprobs,
        old_logprobs=old,
        rollout_logprobs=old,
        advantages=torch.full_like(ratio, advantage),
        sample=torch.arange(len(ratio)),
        num_samples=len(ratio),
    )
    loss = plugins().get("algorithm", name)(**options).token_loss(tokens)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    return loss.detach(), gradient


def main() -> None:
    figure = Figure(figsize=(14, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(PANELS), sharex=True)
    figure.suptitle("solid: A = 1, dashed: A = -1")
    ratio = torch.linspace(0.3001, 2.2, 761, dtype=torch.float64)  # off the kinks, which have no gradient
    for column, (title, losses) in enumerate(PANELS):
        for number, (label, name, options) in enumerate(losses):
            for advantage, style in ((1.0, "-"), (-1.0, "--")):
                curves = curve(name, options, ratio, advantage)
                for axis, values in zip(axes[:, column], curves, strict=True):
                    axis.plot(ratio, values, style, color=f"C{number}", label=label if advantage > 0 else None)
        axes[0, column].set_title(title)
        axes[0, column].legend(fontsize=8)
        axes[1, column].set_xlabel("r = π / π_old")
        for axis in axes[:, column]:
            axis.axvline(1.0, color="0.7", linewidth=0.8, zorder=0)
            axis.grid(alpha=0.25)
    axes[0, 0].set_ylabel("loss of a token")
    axes[1, 0].set_ylabel("d loss / d log π")
    figure.savefig(ROOT / "docs" / "losses.png", dpi=120)


if __name__ == "__main__":
    main()
