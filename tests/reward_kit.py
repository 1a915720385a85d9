"""Episodes for the tests of rewards, and what they all must refuse."""

from __future__ import annotations

from typing import Any

from relax_gym.types import Completion, FinishReason, StopReason, Task, Trajectory, Turn


def episode(
    *actions: str, tokens: tuple[tuple[int, ...], ...] = (), rewards: tuple[float | None, ...] = (), **info: Any
) -> Trajectory:
    """An episode in which the model said `actions`, sampled as `tokens` and paid `rewards`; the env left `info`."""
    turns = tuple(
        Turn(
            observation=(),
            context_ids=(),
            completion=Completion(
                token_ids=ids, logprobs=(0.0,) * len(ids), versions=(0,) * len(ids), finish_reason=FinishReason.STOP
            ),
            text=action,
            action=action,
            reward=reward,
        )
        for action, ids, reward in zip(
            actions, tokens or ((),) * len(actions), rewards or (0.0,) * len(actions), strict=True
        )
    )
    return Trajectory(
        task=Task(env_id="test/Quiz-v0", seed=0),
        episode_id="e1",
        turns=turns,
        stop_reason=StopReason.ENV_DONE,
        info=info,
    )
