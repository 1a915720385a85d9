"""The ranks of the Megatron learner, started by torchrun or Ray: who trains, who serves, how all end together."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from command import run
from learner_cases import context, qwen3, random_batch, save_model
from test_megatron_ranks import gone

from relax_gym.config import parse_config
from relax_gym.context import RunContext
from relax_gym.errors import ConfigError, TrainingError
from relax_gym.run_folder import list_checkpoints
from relax_gym_trainers.megatron_learner import ray_ranks
from relax_gym_trainers.megatron_learner.learner import MegatronLearner
from relax_gym_trainers.megatron_learner.options import MegatronLearnerOptions
from relax_gym_trainers.megatron_learner.ranks import Ranks
from relax_gym_trainers.megatron_learner.ray_ranks import RayOther
from relax_gym_trainers.torch_learner.options import LearnerOptions

ROOT = Path(__file__).parent.parent
PARTS = ["", "envs", "trainers", "rewards", "plugins"]

Popen = subprocess.Popen[str]

CONFIG = """
run_dir = "{folder}/run"
[model]
name = "tiny-qwen3"
[[env]]
id = "relax_gym/GuessNumber-v0"
kwargs = {{ low = 1, high = 15, max_guesses = 4, style = "terse" }}
[rollout]
max_turns = 2
max_new_tokens = 4
[algorithm]
name = "grpo"
[learner]
name = "{learner}"
dtype = "float32"
{options}
[sampler]
name = "local"
dtype = "float32"
[train]
steps = {steps}
groups_per_step = 2
group_size = 4
[eval]
episodes = 0
"""


def config(folder: Path, *, learner: str = "megatron", options: str = "tp = 2", steps: int = 2) -> Path:
    path = folder / "config.toml"
    path.write_text(CONFIG.format(folder=folder, learner=learner, options=options, steps=steps))
    return path


def environment() -> dict[str, str]:
    """A process that is started sees the same code as this one."""
    here = os.pathsep.join([*(str(ROOT / part) for part in PARTS), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": here, "OMP_NUM_THREADS": "1"}


@contextmanager
def torchrun(
    path: Path, where: Sequence[str] = ("--standalone", "--nproc-per-node=2"), program: Sequence[str] = ()
) -> Iterator[Popen]:
    started = program or ["-m", "relax_gym", "train", str(path)]
    command = [sys.executable, "-m", "torch.distributed.run", *where, *started]
    with subprocess.Popen(
        command, env=environment(), cwd=path.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def two_nodes(path: Path) -> Iterator[list[Popen]]:
    """As on two machines with one rank each."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    meeting = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
    with ExitStack() as stack:
        yield [stack.enter_context(torchrun(path, [*meeting, f"--node-rank={node}"])) for node in (0, 1)]


def wait_for_steps(folder: Path, process: Popen) -> None:
    deadline = time.monotonic() + 60
    while not metrics(folder) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.1)


def children(pid: int) -> list[int]:
    """The processes that torchrun has started, by rank."""
    found: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            variables = dict(line.partition("=")[::2] for line in (path / "environ").read_text().split("\0"))
        except OSError:
            continue
        if parent == pid and "RANK" in variables:
            found[int(variables["RANK"])] = int(path.name)
    return [found[rank] for rank in sorted(found)]


def metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run/metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
def test_torchrun_trains_on_the_first_rank_and_the_others_serve(tmp_path: Path) -> None:
    with torchrun(config(tmp_path)) as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert [line["step"] for line in metrics(tmp_path) if line["step"]] == [1, 2]
    assert {path.name for path in tmp_path.iterdir()} == {"config.toml", "run"}  # one run, of one trainer


@pytest.mark.slow
def test_no_rank_outlives_a_trainer_that_is_killed(tmp_path: Path) -> None:
    with torchrun(config(tmp_path, steps=1000)) as process:
        wait_for_steps(tmp_path, process)
        ranks = children(process.pid)
        assert len(ranks) == 2
        os.kill(ranks[0], signal.SIGKILL)
        assert gone(ranks[1], 10)


KEEP_CODE = """#!/bin/sh
trap : TERM
"{python}" -m relax_gym train "{config}"
echo "rank $RANK ends with $?"
"""


@pytest.mark.slow
def test_sigterm_for_all_ranks_lets_the_first_save(tmp_path: Path) -> None:
    """From torchrun, and before that from a scheduler, which sends it to all there are."""
    script = tmp_path / "rank.sh"
    script.write_text(KEEP_CODE.format(python=sys.executable, config=config(tmp_path, steps=1000)))
    script.chmod(0o755)
    with torchrun(script, program=["--no-python", str(script)]) as process:
        wait_for_steps(tmp_path, process)
        for shell in children(process.pid):
            os.killpg(shell, signal.SIGTERM)
        process.terminate()
        output, _ = process.communicate(timeout=60)
    assert "rank 0 ends with 143" in output, output
    assert "rank 1 ends with 0" in output, output
    steps = metrics(tmp_path)[-1]["step"]
    assert f"stopped by SIGTERM after step {steps}, which is saved" in output
    assert [step for step, _ in list_checkpoints(tmp_path / "run")] == [steps]


@pytest.mark.long
def test_two_nodes_train_as_one(tmp_path: Path) -> None:
    with two_nodes(config(tmp_path)) as nodes:
        outputs = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert [line["step"] for line in metrics(tmp_path) if line["step"]] == [1, 2]


@pytest.mark.long
def test_k110_a_node_that_dies_ends_the_run_with_its_rank(tmp_path: Path) -> None:
    with two_nodes(config(tmp_path, steps=1000)) as (first, second):
        wait_for_steps(tmp_path, first)  # so they have trained
        (rank,) = children(second.pid)
        second.kill()
        os.kill(rank, signal.SIGKILL)
        output, _ = first.communicate(timeout=60)
    assert first.returncode == 1
    assert "rank 1 of 2 has closed its connection" in output


def test_a_learner_of_one_process_is_not_launched_several_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        code, _, error = run(capsys, "train", config(tmp_path, learner="torch", options=""))
        assert code == 1
        assert error == (
            'error: 2 processes were started (WORLD_SIZE), but learner.name = "torch" runs in one; start it without '
            'torchrun, or use learner.name = "megatron"\n'
        )
    assert not (tmp_path / "run").exists()


def test_only_the_first_of_several_rehearses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert run(capsys, "train", config(tmp_path), "--dry-run") == (0, "", "")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_k110_ranks_on_a_ray_cluster_train_and_one_that_dies_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed; it is in the extra `ray`")
    save_model(tmp_path / "model", qwen3())
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    monkeypatch.chdir(tmp_path)  # actors run where the cluster was started
    try:
        options = MegatronLearnerOptions.model_validate({"dtype": "float32", "tp": 2, "launcher": "ray"})
        learner = MegatronLearner(dataclasses.replace(context(Path("model")), run_dir=Path("run")), options)
        assert learner.step(random_batch())["updates"] == 1
        learner.save_state(Path("run/checkpoints/1"))()
        learner.load(Path("run/checkpoints/1"))
        other = learner._ranks._others[0]
        assert isinstance(other, RayOther)
        ray.kill(other._actor)
        with pytest.raises(TrainingError, match=r"in step, rank 1 of 2 on [0-9.]+ has ended: ") as caught:
            learner.step(random_batch(1))
        assert "all ranks have been ended" in str(caught.value)
        again = Ranks(2, "ranks_kit:Plain", launcher="ray")  # what was taken is free
        assert again.call("get", "place").world == 2
        again.close()
    finally:
        ray.shutdown()


def test_ranks_are_told_absolute_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Path] = []

    class Told:
        def __init__(self, world: int, entry: str, arguments: tuple[RunContext, object], **options: Any) -> None:
            told.extend([arguments[0].run_dir, arguments[0].model_path, options["logs"]])

        def call(self, method: str, *arguments: Path) -> int:
            told.extend(arguments)
            return 0

    folder = save_model(tmp_path / "model", qwen3())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("relax_gym_trainers.megatron_learner.learner.Ranks", Told)
    run_context = dataclasses.replace(context(folder), run_dir=Path("run"), model_path=Path("model"))
    learner = MegatronLearner(run_context, MegatronLearnerOptions())
    for number, act in enumerate((learner.export, learner.save_state, learner.load)):
        act(Path(f"run/{number}"))
    assert told == [tmp_path / name for name in ("run", "model", "run/learner", "run/0", "run/1", "run/2")]


@pytest.mark.parametrize(
    ("visible", "given", "expected"),
    [
        (None, [], "3"),
        (None, [5], "5"),
        (None, ["5"], "5"),
        ("4,5,6,7", ["4"], "0"),
        ("4, 5", ["5"], "1"),
        ("GPU-8932f937,GPU-65cd7e62", ["GPU-65cd7e62"], "1"),
        ("MIG-65cd7e62", ["MIG-65cd7e62"], "0"),
    ],
)
def test_a_rank_takes_the_gpu_that_ray_gives_it(
    visible: str | None, given: list[int | str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(visible, monkeypatch)
    monkeypatch.setenv("LOCAL_RANK", "3")
    ray_ranks._take(given)
    assert os.environ["LOCAL_RANK"] == expected


@pytest.mark.parametrize(
    ("visible", "given", "message"),
    [
        ("4,5", 0, "the GPU 0, which its process, started with CUDA_VISIBLE_DEVICES=4,5, does not see; start the Ray"),
        (None, "GPU-65cd7e62", "GPU-65cd7e62, which its process, started without CUDA_VISIBLE_DEVICES, does not see"),
    ],
)
def test_a_gpu_that_the_trainer_does_not_see_is_refused(
    visible: str | None, given: int | str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(visible, monkeypatch)
    with pytest.raises(ConfigError, match=message):
        ray_ranks._take([given])


def see(visible: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_ranks_on_a_ray_cluster_of_some_gpus_take_those(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed; it is in the extra `ray`")
    see("4,5", monkeypatch)
    monkeypatch.setenv("LOCAL_RANK", "1")  # which actors have from the process that starts a cluster
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        ranks = Ranks(2, "ranks_kit:Plain", launcher="ray")
        ranks.call("tell_variable", "CUDA_VISIBLE_DEVICES", str(tmp_path))
        other = (tmp_path / "1").read_text()
        ranks.call("tell_variable", "LOCAL_RANK", str(tmp_path))
        ranks.close()
    finally:
        ray.shutdown()
    assert other in ("4", "5")
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["1" if other == "4" else "0", "0"]


def test_ray_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r'learner.launcher = "ray" needs Ray: pip install "relax-gym\[ray\]" on all'):
        Ranks(2, "ranks_kit:Plain", launcher="ray")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            'freeze = ["*.mlp.*"]',
            'the Megatron learner has no freeze; learner.name = "torch" does, and freeze_encoders',
        ),
        ("activation_checkpointing = true", "has no activation_checkpointing; learner.recompute says what is computed"),
    ],
)
def test_options_of_the_torch_learner_say_what_is_here_instead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, message: str
) -> None:
    code, _, error = run(capsys, "train", config(tmp_path, options=option))
    assert code == 1
    assert message in error


BLOCK = re.compile(r"^```toml\n(.*?)^```$", re.M | re.S)


def test_the_configs_of_the_documentation_are_valid(tmp_path: Path) -> None:
    shown = BLOCK.findall((ROOT / "docs/megatron.md").read_text())
    assert len(shown) == 2
    for text in shown:
        whole = tomllib.loads(config(tmp_path).read_text()) | tomllib.loads(text)
        options = parse_config(whole).learner.model_dump()
        assert MegatronLearnerOptions.model_validate({k: v for k, v in options.items() if k != "name"}).tp > 1


def test_the_documentation_names_every_option() -> None:
    text = (ROOT / "docs/megatron.md").read_text()
    own = MegatronLearnerOptions.model_fields.keys() - LearnerOptions.model_fields.keys()
    assert {name for name in own if f"`{name}" not in text} == {"start_timeout"}
