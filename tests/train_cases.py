"""Runs of the loop on a scripted sampler and a learner that keeps its batches."""

from pathlib import Path
from typing import Any

import relax_gym
from relax_gym import running
from relax_gym.build import Parts, build_rewards
from relax_gym.chat import ChatRenderer
from relax_gym.config import load_algorithms, parse_config
from relax_gym.context import RunContext
from relax_gym.run_folder import RunFolder
from relax_gym.tasks import TaskSource
from relax_gym.testing import RecordingLearner, ScriptedSampler, tiny_tokenizer
from relax_gym.train import RunResult, Trainer

TOKENIZER = tiny_tokenizer()


class OneOrTwo(relax_gym.Env):
    """Reward 1 for "a", 0 for anything else; all seeds below `dull` of 10 give 0.5 whatever is said."""

    def __init__(self, dull: int = 0) -> None:
        self.dull = dull

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.is_dull = (seed or 0) % 10 < self.dull
        return relax_gym.user("a or b?"), {}

    def step(self, action: str) -> Any:
        return relax_gym.StepResult([], 0.5 if self.is_dull else float(action == "a"), True, False, {})

    def expert_action(self) -> str:
        return "a"


class Nan(relax_gym.Env):
    """Cannot say how it went when the answer is "a"."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return relax_gym.user("a or b?"), {}

    def step(self, action: str) -> Any:
        return relax_gym.StepResult([], float("nan") if action == "a" else 1.0, True, False, {})


if "test/OneOrTwo-v0" not in relax_gym.list():
    relax_gym.register("test/OneOrTwo-v0", OneOrTwo)
    relax_gym.register("test/Nan-v0", Nan)


def trainer(
    tmp_path: Path,
    script: Any,
    learner: Any = None,
    *,
    delay: int = 0,
    resume: bool = False,
    sampler: Any = None,
    **sections: Any,
) -> Trainer:
    config = parse_config(
        {
            "run_dir": str(tmp_path / "run"),
            "model": {"name": "tiny-qwen3"},
            "env": sections.pop("env", [{"id": "test/OneOrTwo-v0"}]),
            "train": {"steps": 3, "groups_per_step": 2, "group_size": 4, **sections.pop("train", {})},
            "trackers": [],
            **sections,
        }
    )
    folder = RunFolder(config, resume=resume)
    step, checkpoint = folder.checkpoints()[-1] if resume and folder.checkpoints() else (0, None)
    context = RunContext(config=config, run_dir=folder.path, model_path=tmp_path, tokenizer=TOKENIZER, start_step=step)
    parts = Parts(
        context=context,
        renderer=ChatRenderer(TOKENIZER, config.chat),
        tasks=TaskSource(config.env, seed=config.seed, eval_episodes=config.eval.episodes),
        algorithms=load_algorithms(config),
        rewards=build_rewards(config),
        sampler=sampler or ScriptedSampler(script, tokenizer=TOKENIZER, delay=delay),
    )
    return Trainer(parts, learner or RecordingLearner(), [], folder, checkpoint)


def run(loop: Trainer) -> RunResult:
    return running.run(loop.run())


def half_a(prompt: Any, params: Any, turn: int) -> str:
    return "a" if params.seed % 2 else "b"
