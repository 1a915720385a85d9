import json

import numpy as np
import pytest

import relax_gym
from relax_gym.config import EnvConfig
from relax_gym.errors import ConfigError
from relax_gym.tasks import EVAL_SEEDS, TaskSource
from relax_gym_envs.dataset import DatasetEnv

GUESS = EnvConfig(id="relax_gym/GuessNumber-v0")


def rows(tmp_path, count: int) -> EnvConfig:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q{i}", "answer": str(i)}) + "\n" for i in range(count)))
    return EnvConfig(id="relax_gym/Dataset-v0", kwargs={"path": str(path)})


def test_k113_a_task_depends_on_seed_slot_and_attempt_only() -> None:
    one, two = (TaskSource([GUESS], seed=3, eval_episodes=2) for _ in range(2))
    assert two.task(500) == one.task(500)
    assert len({one.task(slot, attempt).seed for slot in range(50) for attempt in range(3)}) == 150
    assert TaskSource([GUESS], seed=4, eval_episodes=2).task(0) != one.task(0)


def test_evaluation_seeds_never_meet_training_seeds() -> None:
    source = TaskSource([GUESS], seed=0, eval_episodes=20)
    assert all(task.seed >= EVAL_SEEDS for task in source.eval_tasks())
    assert all(source.task(slot).seed < EVAL_SEEDS for slot in range(200))
    assert TaskSource([GUESS], seed=7, eval_episodes=20).eval_tasks() == source.eval_tasks()


def prompts(tasks) -> list[str]:
    return [task.options["row"]["prompt"] for task in tasks]


def test_k113_every_row_comes_once_an_epoch_and_held_out_rows_never(tmp_path) -> None:
    env = rows(tmp_path, 13).model_copy(update={"eval_fraction": 0.25})
    source = TaskSource([env], seed=0, eval_episodes=3)
    held_out = set(prompts(source.eval_tasks()))
    epochs = [prompts(source.task(slot) for slot in range(e * 10, e * 10 + 10)) for e in range(2)]
    assert len(held_out) == 3
    assert set(epochs[0]) == set(epochs[1]) == {f"q{i}" for i in range(13)} - held_out
    assert epochs[0] != epochs[1]
    replacement = source.task(4, attempt=2).options["row"]["prompt"]
    assert replacement not in held_out


def test_what_is_held_out_depends_on_the_rows_alone(tmp_path) -> None:
    env = rows(tmp_path, 40)
    sources = [TaskSource([env], seed=seed, eval_episodes=episodes) for seed, episodes in [(0, 0), (0, 2), (7, 30)]]
    trained = [set(prompts(source.task(slot) for slot in range(36))) for source in sources]
    assert trained[0] == trained[1] == trained[2]
    assert len(trained[0]) == 36
    two, all_four = (prompts(source.eval_tasks()) for source in sources[1:])
    assert two == all_four[:2]
    assert set(all_four) == {f"q{i}" for i in range(40)} - trained[0]


def test_two_ids_over_the_same_rows_hold_out_the_same_ones(tmp_path) -> None:
    if "test/OtherDataset-v0" not in relax_gym.list():
        relax_gym.register("test/OtherDataset-v0", DatasetEnv)
    one = rows(tmp_path, 40)
    other = one.model_copy(update={"id": "test/OtherDataset-v0"})
    source = TaskSource([one, other], seed=0, eval_episodes=4)
    held_out = prompts(source.eval_tasks())
    assert held_out[:4] == held_out[4:]
    trained = set(prompts(source.task(slot) for slot in range(200)))
    assert trained == {f"q{i}" for i in range(40)} - set(held_out)


def test_fewer_held_out_rows_than_episodes_is_said_and_none_is_played_twice(tmp_path) -> None:
    source = TaskSource([rows(tmp_path, 40), GUESS], seed=0, eval_episodes=6)
    assert [task.mixture for task in source.eval_tasks()] == [0] * 4 + [1] * 6
    assert source.shortages() == [
        "env 'relax_gym/Dataset-v0' has 4 held-out rows, so that many of eval.episodes = 6 are played; for more, "
        "raise its eval_fraction or give other rows in eval_kwargs"
    ]
    assert TaskSource([rows(tmp_path, 40), GUESS], seed=0, eval_episodes=4).shortages() == []


def test_the_rows_are_shuffled_once_an_epoch(tmp_path, monkeypatch) -> None:
    source = TaskSource([rows(tmp_path, 10)], seed=0, eval_episodes=0)
    source.task(0)
    drawn = []
    rng = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda seed: drawn.append(seed) or rng(seed))
    for slot in [*range(27), 8, 10, 7]:  # slots of neighbouring epochs are asked for in any order
        source.task(slot)
    assert len(drawn) <= 4


def test_weights_mix_envs(tmp_path) -> None:
    mixture = [GUESS.model_copy(update={"weight": 3.0}), EnvConfig(id="relax_gym/TicTacToe-v0")]
    source = TaskSource(mixture, seed=0, eval_episodes=1)
    share = sum(source.task(slot).env_id == GUESS.id for slot in range(1000)) / 1000
    assert 0.7 < share < 0.8
    assert [task.env_id for task in source.eval_tasks()] == [GUESS.id, "relax_gym/TicTacToe-v0"]


def test_too_few_rows_to_hold_out(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"with 1 rows and eval_fraction = 0.1 has none to hold out"):
        TaskSource([rows(tmp_path, 1)], seed=0, eval_episodes=5)
    assert prompts([TaskSource([rows(tmp_path, 1)], seed=0, eval_episodes=0).task(0)]) == ["q0"]


def test_nothing_is_held_out_when_told_so(tmp_path) -> None:
    everything = rows(tmp_path, 5).model_copy(update={"eval_fraction": 0.0})
    source = TaskSource([everything], seed=0, eval_episodes=0)
    assert sorted(prompts(source.task(slot) for slot in range(5))) == [f"q{i}" for i in range(5)]


def test_separate_evaluation_rows(tmp_path) -> None:
    train = rows(tmp_path, 4)
    other = tmp_path / "eval.jsonl"
    other.write_text('{"prompt": "held out", "answer": "1"}\n')
    source = TaskSource([train.model_copy(update={"eval_kwargs": {"path": str(other)}})], seed=0, eval_episodes=2)
    assert prompts(source.eval_tasks()) == ["held out"]
    assert all(task.kwargs["path"] == str(other) for task in source.eval_tasks())
    assert len(source.shortages()) == 1
    assert set(prompts(source.task(slot) for slot in range(4))) == {f"q{i}" for i in range(4)}
