"""A tiny student approaches a tiny teacher: whole runs with the real sampler and learner."""

from pathlib import Path
from typing import Any

import pytest

from relax_gym.config import parse_config
from relax_gym.lines import read_lines
from relax_gym.train import train

GUESS: dict[str, Any] = {
    "id": "relax_gym/GuessNumber-v0",
    "kwargs": {"low": 1, "high": 7, "max_guesses": 3, "style": "terse"},
}
TIC_TAC_TOE: dict[str, Any] = {"id": "relax_gym/TicTacToe-v0"}
EXPERT = {"steps": 60, "episodes_per_step": 16, "lr": 2e-3, "expert_probability": 0.5}
FROZEN = {"name": "torch", "lr": 1e-12, "dtype": "float32"}


def tiny(seed: int) -> dict[str, Any]:
    return {"name": "tiny-qwen3", "kwargs": {"hidden_size": 64, "num_layers": 2, "seed": seed}}


def run(folder: Path, **sections: Any) -> list[dict[str, Any]]:
    """Metrics of the steps."""
    config = {
        "run_dir": str(folder),
        "threads": 1,
        "trackers": [],
        "env": [GUESS],
        "rollout": {"max_turns": 3, "max_new_tokens": 4},
        "sampler": {"name": "local", "dtype": "float32"},
        "learner": {"name": "torch", "lr": 2e-3, "dtype": "float32"},
        **sections,
    }
    train(parse_config(config))
    return [line for line in read_lines(folder / "metrics.jsonl") if "learner/loss" in line]


def checkpoint(folder: Path) -> str:
    return str(next((folder / "checkpoints").iterdir()))


def make_teacher(folder: Path, seed: int, env: dict[str, Any]) -> str:
    """A model that has imitated an expert half of whose moves are random: more to learn than the best one."""
    one_step = {"steps": 1, "groups_per_step": 1, "group_size": 2}
    run(folder, model=tiny(seed), env=[env], warmup=EXPERT, learner=FROZEN, train=one_step)
    return checkpoint(folder)


@pytest.fixture(scope="module")
def guesser(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_teacher(tmp_path_factory.mktemp("guesser"), 1, GUESS)


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_teacher(tmp_path_factory.mktemp("player"), 2, TIC_TAC_TOE)


def kl(folder: Path, model: dict[str, Any], env: dict[str, Any], teacher: str) -> float:
    """KL(policy‖teacher) in nats for each token of fresh samples, over the whole vocabulary."""
    algorithm = {"name": "opd", "teacher": teacher}
    one_step = {"steps": 1, "groups_per_step": 8, "group_size": 8}
    (metrics,) = run(folder, model=model, env=[env], seed=77, learner=FROZEN, algorithm=algorithm, train=one_step)
    return float(metrics["learner/opd_kl"])


def share_left(folder: Path, env: dict[str, Any], teacher: str) -> float:
    """KL after the run `folder`/run, in units of that before."""
    after, before = {"name": checkpoint(folder / "run")}, tiny(0)
    name = env["id"].split("/")[1]
    return kl(folder / f"{name}-after", after, env, teacher) / kl(folder / f"{name}-before", before, env, teacher)


@pytest.mark.parametrize(
    ("algorithm", "steps"),
    [
        ({}, 30),
        ({"top_k": 8}, 30),
        pytest.param({"level": "reward"}, 70, marks=(pytest.mark.slow, pytest.mark.long)),
        pytest.param({"form": "forward"}, 30, marks=(pytest.mark.slow, pytest.mark.long)),
        pytest.param({"form": "jsd"}, 40, marks=(pytest.mark.slow, pytest.mark.long)),
    ],
)
def test_the_kl_to_the_teacher_falls_by_90_percent(
    algorithm: dict[str, Any], steps: int, guesser: str, tmp_path: Path
) -> None:
    run(
        tmp_path / "run",
        model=tiny(0),
        algorithm={"name": "opd", "teacher": guesser, **algorithm},
        train={"steps": steps, "groups_per_step": 8, "group_size": 8},
    )
    assert share_left(tmp_path, GUESS, guesser) <= 0.1


@pytest.mark.slow
@pytest.mark.long
def test_each_env_of_a_mixture_has_its_own_teacher(guesser: str, player: str, tmp_path: Path) -> None:
    run(
        tmp_path / "run",
        model=tiny(0),
        env=[GUESS, TIC_TAC_TOE],
        algorithm={"name": "opd", "teachers": {GUESS["id"]: guesser, TIC_TAC_TOE["id"]: player}},
        train={"steps": 50, "groups_per_step": 8, "group_size": 8},
    )
    assert share_left(tmp_path, GUESS, guesser) <= 0.1
    assert share_left(tmp_path, TIC_TAC_TOE, player) <= 0.1
