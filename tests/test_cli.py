"""The command line, in this process: what it prints, what it refuses, and how it ends."""

from __future__ import annotations

import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from command import run

from relax_gym.cli import main
from relax_gym.errors import ConfigError, EnvError, first_cause
from relax_gym.hookspecs import hookimpl
from relax_gym.lines import read_lines
from relax_gym.plugins import plugins

CONFIG = """\
seed = 3
run_dir = "RUN"
trackers = []

[model]
name = "tiny-qwen3"
kwargs = { hidden_size = 16, num_layers = 1, num_heads = 2, num_kv_heads = 1 }

[[env]]
id = "relax_gym/GuessNumber-v0"
kwargs = { style = "terse", max_guesses = 2 }

[[reward]]
name = "env"

[rollout]
max_turns = 2
max_new_tokens = 2

[algorithm]
name = "grpo"

[learner]
name = "torch"
lr = 1e-3

[train]
steps = 2
groups_per_step = 2
group_size = 2

[eval]
episodes = 3
"""


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RELAX_GYM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write(tmp_path, CONFIG)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text.replace("RUN", str(tmp_path / "run")))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A config that was trained, and what that printed."""
    folder = tmp_path_factory.mktemp("trained")
    path = write(folder, CONFIG)
    stdout, sys.stdout = sys.stdout, StringIO()
    try:
        with pytest.raises(SystemExit) as end:
            main(["train", str(path)])
        printed = sys.stdout.getvalue()
    finally:
        sys.stdout = stdout
    assert end.value.code in (0, None)
    return path, printed


# Help ----------------------------------------------------------------------------------------------------------------


def test_version(capsys) -> None:
    assert run(capsys, "--version")[:2] == (0, "relax-gym 0.1.0\n")


def test_help_names_every_command(capsys) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for command in ("train", "eval", "view", "envs", "rewards", "plugins", "init"):
        assert f" {command} " in out


def test_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "relax_gym", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == "relax-gym 0.1.0\n"


@pytest.mark.parametrize(
    "arguments", [["train"], ["envs", "fly"], ["train", "x.toml", "--stpes"], ["view", "x", "--limit", "0"]]
)
def test_wrong_usage_is_exit_code_2(capsys, arguments: list[str]) -> None:
    assert run(capsys, *arguments)[0] == 2


# Bad input -----------------------------------------------------------------------------------------------------------

BAD = {
    "malformed TOML": (('name = "grpo"', "name = "), [], ["run.toml", "not valid TOML", "line "]),
    "misspelt key": (("group_size = 2", "group_sise = 2"), [], ["'train.group_sise'", "did you mean 'group_size'?"]),
    "misspelt section": (("[rollout]", "[rolout]"), [], ["'rolout'", "did you mean 'rollout'?"]),
    "missing key": (("steps = 2\n", ""), [], ["'train.steps' is missing"]),
    "wrong type": (("steps = 2", 'steps = "many"'), [], ["train.steps = 'many'", "integer"]),
    "group of one": (("group_size = 2", "group_size = 1"), [], ["train.group_size = 1", "give 2 or more"]),
    "temperature 0": ((), ["--set", "rollout.temperature=0"], ["rollout.temperature = 0", "greater than 0"]),
    "negative temperature": ((), ["--set", "rollout.temperature=-1"], ["rollout.temperature = -1", "greater than 0"]),
    "unknown env": (("GuessNumber-v0", "GesNumber-v0"), [], ["unknown env", "mean 'relax_gym/GuessNumber-v0'?"]),
    "env in a file": (
        ('"relax_gym/GuessNumber-v0"', '"my_env.py:Mine"'),
        [],
        ["unknown env 'my_env.py:Mine'", "envs of installed plugins only: `relax-gym init plugin NAME` makes one"],
    ),
    "env argument": (("style =", "stile ="), [], ["takes no argument 'stile'", "did you mean 'style'?"]),
    "unknown reward": (('name = "env"', 'name = "enf"'), [], ["unknown reward 'enf'", "did you mean 'env'?"]),
    "unknown algorithm": (('name = "grpo"', 'name = "grpoo"'), [], ["unknown algorithm 'grpoo'", "mean 'grpo'?"]),
    "unknown sampler": ((), ["--set", "sampler.name=lokal"], ["unknown sampler 'lokal'", "did you mean 'local'?"]),
    "unknown learner": (('name = "torch"', 'name = "troch"'), [], ["unknown learner 'troch'", "mean 'torch'?"]),
    "unknown tracker": ((), ["--set", 'trackers=[{name="tensorbord"}]'], ["unknown tracker", "mean 'tensorboard'?"]),
    "learner option": (("lr = 1e-3", "lrr = 1e-3"), [], ["'learner.lrr'", "did you mean 'lr'?"]),
    "algorithm option": ((), ["--set", "algorithm.clip_low=2"], ["algorithm.clip_low = 2", "less than 1"]),
    "malformed --set": ((), ["--set", "train.steps"], ["--set 'train.steps'", "section.key=value"]),
    "model option": ((), ["--set", "model.kwargs.hidden_sice=8"], ["hidden_sice", "did you mean 'hidden_size'?"]),
    "no such model": ((), ["--set", "model={name='./nowhere'}"], ["model folder nowhere does not exist"]),
    "nothing to resume": ((), ["--resume"], ["nothing to resume", "leave out --resume"]),
    "unwritable run folder": ((), ["--set", "run_dir=/dev/null/run"], ["cannot write run folder", "--set run_dir"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_readable_message(capsys, tmp_path: Path, case: str) -> None:
    edit, options, expected = BAD[case]
    text = CONFIG
    if edit:
        assert edit[0] in CONFIG
        text = CONFIG.replace(*edit)
    code, _, err = run(capsys, "train", write(tmp_path, text), *options)
    assert code == 1
    assert err.startswith("error: ")
    assert "Traceback" not in err
    for part in expected:
        assert part in err


def test_missing_config_is_named(capsys) -> None:
    code, _, err = run(capsys, "train", "nowhere.toml")
    assert (code, err) == (1, "error: cannot read config 'nowhere.toml': No such file or directory\n")


def test_bad_config_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    path = write(tmp_path, CONFIG.replace("group_size = 2", "group_size = 1"))
    code = (
        "import sys\nfrom relax_gym.cli import main\n"
        f"try:\n    main(['train', {str(path)!r}])\n"
        "except SystemExit as end:\n    print(end.code, 'torch' in sys.modules, 'transformers' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1 False False\n"


def test_traceback_on_request(capsys, monkeypatch) -> None:
    monkeypatch.setenv("RELAX_GYM_TRACEBACK", "1")
    code, _, err = run(capsys, "train", "nowhere.toml")
    assert code == 1
    assert "Traceback" in err
    assert err.endswith("error: cannot read config 'nowhere.toml': No such file or directory\n")


def test_an_error_to_act_on_is_shown_before_others_of_its_group() -> None:
    known, unknown = EnvError("lost"), ValueError("x")
    group = ExceptionGroup("a", [unknown, ExceptionGroup("b", [known, ConfigError("later")])])
    assert first_cause(group) is known
    assert first_cause(ExceptionGroup("a", [unknown, KeyError("y")])) is unknown
    assert first_cause(unknown) is unknown


# Train, eval, view ---------------------------------------------------------------------------------------------------


def test_train_prints_plain_lines(trained: tuple[Path, str]) -> None:
    path, printed = trained
    lines = printed.splitlines()
    assert lines[0].startswith(f"run {path.parent / 'run'}  model ")
    assert [line[:9] for line in lines if line.startswith("step ")] == ["step 1/2 ", "step 2/2 "]
    assert sum(line.startswith("eval after step ") for line in lines) == 2
    assert f"checkpoint {path.parent / 'run' / 'checkpoints' / 'step-000002'}" in lines
    assert lines[-2:] == [
        f"run folder: {path.parent / 'run'}",
        f"look at episodes: relax-gym view {path.parent / 'run'}",
    ]


def test_display_leaves_with_the_run(trained: tuple[Path, str]) -> None:
    assert plugins().manager.get_plugin("relax_gym.display") is None


def test_second_run_in_one_folder_is_refused(capsys, trained: tuple[Path, str]) -> None:
    code, _, err = run(capsys, "train", trained[0])
    assert code == 1
    assert "already holds a run; continue it with --resume" in err


def test_resume_of_another_run_is_refused(capsys, trained: tuple[Path, str]) -> None:
    code, _, err = run(capsys, "train", trained[0], "--resume", "--set", "seed=4")
    assert code == 1
    assert "holds another run (seed: 3 there, 4 here)" in err


@pytest.mark.parametrize("options", [[], ["--checkpoint", "2"]])
def test_eval_of_a_run(capsys, trained: tuple[Path, str], options: list[str]) -> None:
    folder = trained[0].parent / "run"
    code, out, _ = run(capsys, "eval", folder, "--episodes", "2", *options)
    assert code == 0
    model, header, row = out.splitlines()
    assert model == f"model: {folder / 'checkpoints' / 'step-000002'}"
    assert header.split() == ["env", "episodes", "reward", "accuracy", "turns", "tokens", "endings"]
    assert row.split()[:2] == ["relax_gym/GuessNumber-v0", "2"]


def test_eval_of_a_config_uses_its_model(capsys, trained: tuple[Path, str]) -> None:
    code, out, _ = run(capsys, "eval", trained[0])
    assert code == 0
    assert out.splitlines()[0] == "model: tiny-qwen3"
    assert out.splitlines()[2].split()[:2] == ["relax_gym/GuessNumber-v0", "3"]


def test_eval_of_a_missing_checkpoint_says_which_there_are(capsys, trained: tuple[Path, str]) -> None:
    code, _, err = run(capsys, "eval", trained[0].parent / "run", "--checkpoint", "7")
    assert code == 1
    assert "has no checkpoint of step 7; it has: 2" in err


def test_view_shows_what_was_sampled(capsys, trained: tuple[Path, str]) -> None:
    folder = trained[0].parent / "run"
    record = next(r for r in read_lines(folder / "episodes.jsonl") if r["step"] == 2 and r["kind"] == "train")
    code, out, _ = run(capsys, "view", folder, "--step", "2", "--kind", "train", "--limit", "1")
    assert code == 0
    assert f"episode {record['episode_id']}  relax_gym/GuessNumber-v0  seed {record['seed']}  step 2  train" in out
    assert "<|im_start|>user\nguess 1-10<|im_end|>\n<|im_start|>assistant\n" in out
    assert f"stop {record['stop_reason']}" in out


def test_interrupted_run_says_how_to_go_on(capsys, config: Path) -> None:
    class Interrupt:
        @hookimpl
        def on_batch(self) -> None:
            raise KeyboardInterrupt

    plugins().manager.register(interrupt := Interrupt())
    try:
        code, _, err = run(capsys, "train", config, "--set", "seed=5")
    finally:
        plugins().manager.unregister(interrupt)
    assert code == 130
    assert f"interrupted; continue with: relax-gym train {config} --set seed=5 --resume\n" in err


def test_a_run_interrupted_before_it_began_has_nothing_to_resume(capsys, config: Path, monkeypatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(plugins().tables["reward"]._values, "env", interrupted)
    code, _, err = run(capsys, "train", config)
    assert code == 130
    assert err.endswith(f"interrupted; start again with: relax-gym train {config}\n")


def test_dry_run_shows_everything_and_writes_nothing(capsys, config: Path) -> None:
    code, out, _ = run(capsys, "train", config, "--dry-run", "--set", "rollout.max_turns=1", "--set", "eval.episodes=0")
    assert code == 0
    assert 'id = "relax_gym/GuessNumber-v0"' in out
    assert "tiny-qwen3: Qwen3ForCausalLM, " in out
    assert "prefix_preserving: True" in out
    assert "<|im_start|>user\nguess 1-10<|im_end|>" in out
    assert "an episode of the expert:\n  '5' (2 tokens) → reward " in out
    assert "2 groups of 2: 4 episodes, at most 8 sampled tokens; 2 steps" in out
    assert "relax_gym/GuessNumber-v0: the episode did not end within rollout.max_turns = 1" in out
    assert "eval.episodes is 0" in out
    assert not (config.parent / "run").exists()


def test_dry_run_warns_of_an_answer_that_does_not_fit(capsys, config: Path) -> None:
    _, out, _ = run(capsys, "train", config, "--dry-run", "--set", "rollout.max_new_tokens=1")
    assert "an answer of the expert has 2 tokens, more than rollout.max_new_tokens = 1" in out
