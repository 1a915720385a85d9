"""`--dry-run` ends with exit code 1 on whatever would keep the run from starting or an env from being learnt."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Sequence
from pathlib import Path

import faulty_envs  # noqa: F401 (registers its envs)
import pytest
from command import run
from transformers import BloomConfig

from relax_gym.build import build_renderer
from relax_gym.config import ModelConfig, Options, dump_config, load_config, parse_config
from relax_gym.dry_run import dry_run
from relax_gym.errors import ModelError
from relax_gym.models import positions, resolve_model
from relax_gym.plugins import plugins
from relax_gym.types import Trajectory
from relax_gym_plugins.samplers.local.options import LocalSamplerOptions

CONFIG = """\
run_dir = "RUN"
trackers = []
[model]
name = "tiny-qwen3"
kwargs = { hidden_size = 16, num_layers = 1, num_heads = 2, num_kv_heads = 1 }
[[env]]
id = "relax_gym/GuessNumber-v0"
[train]
steps = 2
groups_per_step = 2
group_size = 2
[eval]
episodes = 3
"""
MODEL = ModelConfig(name="tiny-qwen3", kwargs={"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1})


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.replace("RUN", str(tmp_path / "run")))
    return path


def test_a_good_config_has_no_failure(capsys, config: Path) -> None:
    code, out, _ = run(capsys, "train", config, "--dry-run")
    assert (code, out.rstrip().endswith("== failures\nnone")) == (0, True)


def test_models_that_see_are_built_as_those_that_only_read(capsys, config: Path) -> None:
    config.write_text(CONFIG.replace("RUN", str(config.parent / "run")).replace('tiny-qwen3"', 'tiny-qwen3-vl"'))
    options = ("--set", "model.kwargs={hidden_size = 16, num_layers = 1, num_heads = 2}")
    code, out, _ = run(capsys, "train", config, "--dry-run", *options)
    assert (code, "Qwen3VLForConditionalGeneration" in out) == (0, True)


def test_a_failing_episode_is_a_failure(capsys, config: Path) -> None:
    options = ("--set", "env.0.id=test/Faulty-v0", "--set", "env.0.kwargs={fault = 'step'}")
    code, out, _ = run(capsys, "train", config, "--dry-run", *options)
    assert code == 1
    assert "== failures\ntest/Faulty-v0: the episode failed at turn 1: KeyError: 'lost item'\n" in out


def test_a_run_dir_that_is_used_or_cannot_be_written_is_a_failure(capsys, config: Path) -> None:
    folder = config.parent / "run"
    code, out, _ = run(capsys, "train", config, "--dry-run", "--resume")
    assert (code, f"== failures\nnothing to resume: {str(folder)!r} holds no run" in out) == (1, True)
    folder.mkdir()
    (folder / "config.toml").write_text("")
    code, out, _ = run(capsys, "train", config, "--dry-run")
    assert (code, f"== failures\nrun folder {str(folder)!r} already holds a run" in out) == (1, True)
    code, out, _ = run(capsys, "train", config, "--dry-run", "--resume")
    assert (code, f"== failures\n{folder}/config.toml: key 'model' is missing" in out) == (1, True)
    (folder / "config.toml").write_text(dump_config(load_config(config)))
    assert run(capsys, "train", config, "--dry-run", "--resume")[0] == 0
    code, out, _ = run(capsys, "train", config, "--dry-run", "--resume", "--set", "seed=5")
    assert (code, f"{str(folder)!r} holds another run (seed: 0 there, 5 here)" in out) == (1, True)
    assert [path.name for path in folder.iterdir()] == ["config.toml"]
    code, out, _ = run(capsys, "train", config, "--dry-run", "--set", f"run_dir={config}/run")
    assert (code, f"== failures\ncannot write run folder '{config}/run': Not a directory" in out) == (1, True)


def test_bad_values_are_refused_as_the_run_refuses_them(capsys, config: Path) -> None:
    code, _, err = run(capsys, "train", config, "--dry-run", "--set", "env.0.kwargs.high=-5")
    assert (code, err.startswith("error: env.0.kwargs = {'high': -5}: env 'relax_gym/GuessNumber-v0' cannot")) == (
        1,
        True,
    )


def local_model(config: Path, **changes: object) -> Path:
    """The config's model in a folder of its own, with other settings."""
    folder = config.parent / "model"
    shutil.copytree(resolve_model(MODEL), folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, **changes}))
    config.write_text(config.read_text().replace(next(x for x in CONFIG.splitlines() if "kwargs" in x) + "\n", ""))
    return folder


def test_an_unsupported_architecture_is_one_message(capsys, config: Path) -> None:
    folder = local_model(config, model_type="no_such_type")
    code, _, err = run(capsys, "train", config, "--dry-run", "--set", f"model.name={folder}")
    assert code == 1
    assert err.startswith(f"error: model folder {folder} cannot be built: ")
    assert "no_such_type" in err


def test_the_context_is_the_samplers(capsys, config: Path) -> None:
    asked = ("train", config, "--dry-run", "--set", f"model.name={local_model(config, max_position_embeddings=20000)}")
    assert "context 8192 tokens\n" in run(capsys, *asked)[1]
    code, out, _ = run(capsys, *asked, "--set", "sampler.max_context=8")
    assert code == 1
    assert "context 8 tokens\n" in out
    assert "the first prompt does not fit in the context" in out
    assert run(capsys, *asked, "--set", "sampler.max_context=30000")[2] == (
        "error: sampler.max_context = 30000: the model has only 20000 positions\n"
    )


def test_a_model_that_does_not_say_how_many_positions_it_has() -> None:
    assert positions(BloomConfig()) is None
    assert LocalSamplerOptions().context_limit(positions(BloomConfig())) == 8192
    assert Options().context_limit(None) is None


class Closing:
    """Counts how often it was closed."""

    closed = 0

    def __call__(self, trajectory: Trajectory) -> float:
        return 0.0

    async def close(self) -> None:
        Closing.closed += 1


class Members:
    def score_group(self, trajectories: Sequence[Trajectory]) -> list[float]:
        return [float(len(trajectories))] * len(trajectories)


def test_rewards_of_groups_get_a_group_of_the_one_episode(config: Path) -> None:
    plugins().tables["reward"].add("test_dry_members", Members, "test")
    given = parse_config({**tomllib.loads(config.read_text()), "reward": [{"name": "test_dry_members"}]})
    assert [one.trajectory.reward for one in dry_run(given).rehearsals] == [2.0]


def test_rewards_are_closed_once_whatever_ends_the_rehearsal(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins().tables["reward"].add("test_dry_closing", Closing, "test")

    def closes(error: type[BaseException], **sections: object) -> int:
        Closing.closed = 0
        given = parse_config(
            {**tomllib.loads(config.read_text()), "reward": [{"name": "test_dry_closing"}], **sections}
        )
        with pytest.raises(error):
            dry_run(given)
        return Closing.closed

    assert closes(ModelError, model={"name": "./no/such/model"}) == 1
    monkeypatch.setattr("relax_gym.dry_run.score", lambda *args, **kwargs: 1 / 0)
    assert closes(ZeroDivisionError) == 1


def test_a_teacher_that_is_not_there_is_found_missing(capsys, config: Path) -> None:
    options = ("--set", "algorithm={name = 'opd', teacher = './no/such/teacher'}")
    code, _, err = run(capsys, "train", config, "--dry-run", *options)
    assert code == 1
    assert err.startswith("error: model folder no/such/teacher does not exist")


def test_what_an_engine_serves_is_not_looked_for_here(capsys, config: Path) -> None:
    engine = "teacher_engine = 'local', level = 'reward'"
    options = ("--set", f"algorithm={{name = 'opd', teacher = './no/such/teacher', {engine}}}")
    code, _, err = run(capsys, "train", config, "--dry-run", *options)
    assert (code, err) == (0, "")


def test_the_renderer_of_a_run_knows_the_models_own_stop_ids(config: Path) -> None:
    folder = config.parent / "model"
    shutil.copytree(resolve_model(MODEL), folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    parsed = parse_config(
        {
            "model": {"name": str(folder)},
            "env": [{"id": "relax_gym/GuessNumber-v0"}],
            "train": {"steps": 1, "groups_per_step": 1, "group_size": 2},
        }
    )
    assert build_renderer(parsed, folder).stop_token_ids[-2:] == (7, 9)
