"""AdamW, the learning rate as a function of the step, and an update that refuses broken gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from relax_gym.errors import TrainingError
from relax_gym_trainers.torch_learner.options import LearnerOptions


def learning_rate(options: LearnerOptions, step: int, total_steps: int) -> float:
    """Learning rate of the 0-based step: a linear rise over `warmup_steps` to lr, then the schedule to `total_steps`.

    A schedule other than constant ends just above min_lr_ratio · lr, which it would reach at step `total_steps`.
    """
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    if options.schedule == "constant":
        return options.lr
    progress = min(1.0, (step - options.warmup_steps) / max(1, total_steps - options.warmup_steps))
    left = 1 - progress if options.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return options.lr * (options.min_lr_ratio + (1 - options.min_lr_ratio) * left)


def build_optimizer(parameters: Sequence[torch.nn.Parameter], options: LearnerOptions) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, one fused kernel."""
    return torch.optim.AdamW(
        parameters,
        lr=options.lr,
        betas=options.betas,
        eps=options.eps,
        weight_decay=options.weight_decay,
        fused=True,
    )


def apply_gradient(optimizer: torch.optim.AdamW, *, lr: float, clip: float, step: int) -> float:
    """Clip the gradient to norm `clip` (0: not), take one optimizer step, free the gradient. Returns the norm before.

    What nothing in the update depended on, as encoders without media, has the gradient 0: momentum and decay go on.

    Raises:
        TrainingError: the gradient is not finite; neither weights nor optimizer state have changed.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    norm = torch.nn.utils.clip_grad_norm_(parameters, clip or math.inf).item()
    if not math.isfinite(norm):
        optimizer.zero_grad()
        raise TrainingError(non_finite("gradient norm", norm, step))
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    return norm


def non_finite(what: str, value: float, step: int) -> str:
    """The message of a step whose loss or gradient is broken."""
    return (
        f"the {what} of step {step} is {value}; the weights are as they were before this update. Check the rewards of "
        "the step's episodes and the metric logprob_diff_max (sampler and learner must agree); try a smaller "
        "learner.lr or learner.dtype = 'float32'"
    )
