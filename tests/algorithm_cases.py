"""Every algorithm with options it can run with, groups built from numbers, and a policy that is a table."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from learner_cases import sample
from torch import Tensor

from relax_gym.algorithm import Algorithm, TrainedTokens
from relax_gym.plugins import plugins
from relax_gym.types import Completion, FinishReason, Group, StopReason, Task, TrainingSample, Trajectory, Turn
from relax_gym_trainers.reference import Reference
from relax_gym_trainers.torch_learner.backend import TorchBackend
from relax_gym_trainers.torch_learner.objectives import Objective, shape
from relax_gym_trainers.torch_learner.options import TorchLearnerOptions
from relax_gym_trainers.torch_learner.update import Tally

NEEDED: dict[str, dict[str, Any]] = {"dr_grpo": {"token_sum_norm": 8.0}}
NAMES = [
    "cispo",
    "dapo",
    "dr_grpo",
    "grpo",
    "gspo",
    "gspo_token",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "rloo",
    "sapo",
    "sft",
]
VOCABULARY = 11


def build(name: str, **options: Any) -> Algorithm:
    algorithm: Algorithm = plugins().get("algorithm", name)(**{**NEEDED.get(name, {}), **options})
    return algorithm


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def tokens(
    logprobs: Tensor,
    advantages: Sequence[float],
    *,
    old: Sequence[float] | None = None,
    rollout: Sequence[float] | None = None,
    sample: Sequence[int] | None = None,
) -> TrainedTokens:
    """`old` and `rollout` are -1 unless given; each token is a sample of its own unless `sample` says otherwise."""
    minus_one = [-1.0] * len(logprobs)
    index = list(range(len(logprobs))) if sample is None else list(sample)
    return TrainedTokens(
        logprobs=logprobs,
        old_logprobs=t(*(old or minus_one)),
        rollout_logprobs=t(*(rollout or old or minus_one)),
        advantages=t(*advantages),
        sample=torch.tensor(index),
        num_samples=max(index) + 1,
    )


# ---- groups --------------------------------------------------------------------------------------


def turn(context: Sequence[int], said: Sequence[int], *, reward: float | None = 0.0, new: bool = False) -> Turn:
    return Turn(
        observation=(),
        context_ids=tuple(context),
        completion=Completion(
            token_ids=tuple(said),
            logprobs=(-1.0,) * len(said),
            versions=(0,) * len(said),
            finish_reason=FinishReason.STOP,
        ),
        text="",
        action="",
        reward=reward,
        new_segment=new,
    )


def episode(id: str, turns: Sequence[Turn], **rewards: float | None) -> Trajectory:
    """An episode whose only reward is the env's unless `rewards` are given."""
    trajectory = Trajectory(
        task=Task(env_id="test/X-v0", seed=0), episode_id=id, turns=tuple(turns), stop_reason=StopReason.ENV_DONE
    )
    scores = rewards or {"env": trajectory.env_return}
    return Trajectory(
        task=trajectory.task, episode_id=id, turns=tuple(turns), stop_reason=StopReason.ENV_DONE, rewards=scores
    )


def group(rewards: Sequence[float | None], *, lengths: Sequence[int] | None = None, id: str = "g") -> Group:
    """One-turn episodes of given length (1 unless given) and reward."""
    sizes = lengths or [1] * len(rewards)
    return Group(
        group_id=id,
        slot=0,
        trajectories=tuple(
            episode(f"{id}-{index}", [turn([1, 2], [3] * size)], env=reward)
            for index, (reward, size) in enumerate(zip(rewards, sizes, strict=True))
        ),
    )


# ---- a policy without a model --------------------------------------------------------------------


class TablePolicy:
    """A policy to an `Objective`: the next token depends on nothing but the last one, in float64."""

    device = torch.device("cpu")
    pair_cost = 0.0

    def __init__(self, *, share: bool) -> None:
        self.share_prefix = share
        self.table = random_table(0).requires_grad_()

    @contextlib.contextmanager
    def as_table(self, table: Tensor) -> Iterator[None]:
        own, self.table.data = self.table.data, table
        yield
        self.table.data = own

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def score(self, batch: Any) -> tuple[Tensor, Tensor]:
        before = torch.from_numpy(batch.ids.reshape(-1)[batch.predictors])
        log_p = self.table.log_softmax(-1)[before]
        targets = torch.from_numpy(batch.targets)
        return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


class TableBackend(TorchBackend):
    """Computes with a table; the reference is another one."""

    def __init__(self, policy: TablePolicy, *, budget: int) -> None:
        self.policy: Any = policy
        self.options = TorchLearnerOptions(micro_batch_tokens=budget)
        self.parameters: Any = [policy.table]
        self.reference = Reference(self.parameters)
        self.reference.values = [random_table(2)]


def random_table(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCABULARY, VOCABULARY, dtype=torch.float64, generator=generator)


def random_samples(rng: np.random.Generator, count: int) -> list[TrainingSample]:
    """Samples of unequal lengths with one to three turns, some with one prompt; each turn has an advantage."""
    prompts = [rng.integers(0, VOCABULARY, rng.integers(1, 5)).tolist() for _ in range(2)]
    out = []
    for index in range(count):
        ids, mask = list(prompts[index % 2]), [0] * len(prompts[index % 2])
        for _ in range(rng.integers(1, 4)):
            said, reply = int(rng.integers(1, 5)), int(rng.integers(1, 4))
            ids += rng.integers(0, VOCABULARY, said + reply).tolist()
            mask += [1] * said + [0] * reply
        logprobs = np.where(np.array(mask) == 1, -2.4 + rng.normal(0, 0.5, len(mask)), 0.0)
        made = sample(ids, mask, logprobs=logprobs, group=f"g{index % 2}", episode=f"e{index}")
        for start, end in made.turn_spans:
            made.advantages[start:end] = rng.normal()
        out.append(made)
    return out


def loss_and_gradient(
    algorithm: Algorithm,
    samples: Sequence[TrainingSample],
    *,
    budget: int = 10_000,
    share: bool = True,
    ranks: Sequence[Sequence[int]] | None = None,
) -> tuple[float, Tensor]:
    """The loss of a second update on the samples and its gradient against the table; reference and policy before the
    first update are other tables. `ranks` are the indices of the samples on each of several ranks, which are summed.
    """
    policy = TablePolicy(share=share)
    backend = TableBackend(policy, budget=budget)
    objective = Objective(algorithm=algorithm, distiller=None, loss_weight=1.0, backend=backend)
    with policy.as_table(random_table(0) + 0.3 * random_table(1)):
        shaped = shape(samples, {objective: range(len(samples))}, Tally())
        shards = [range(len(samples))] if ranks is None else ranks
        pieces = [objective.piece([shaped[i] for i in shard], shaped, only=False) for shard in shards]
    loss = sum(backend.accumulate(piece, tally=Tally(), first=True, step=1) for piece in pieces)
    return loss, torch.zeros_like(policy.table) if policy.table.grad is None else policy.table.grad
