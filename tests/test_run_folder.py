import dataclasses
import json
import math
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest

from relax_gym.config import LearnerSection, RunConfig, parse_config
from relax_gym.errors import RunFolderError
from relax_gym.lines import cut_lines, json_text, read_lines
from relax_gym.manifest import PACKAGES
from relax_gym.plugins import plugins
from relax_gym.run_folder import RunFolder
from relax_gym.trajectory import to_samples
from relax_gym.types import Completion, FinishReason, Group, StopReason, Task, Trajectory, Turn


def config(path, **train: object):
    return parse_config(
        {
            "run_dir": str(path),
            "model": {"name": "tiny-qwen3"},
            "env": [{"id": "relax_gym/GuessNumber-v0"}],
            "train": {"steps": 2, "groups_per_step": 2, "group_size": 2, **train},
        }
    )


def begun(config) -> RunFolder:
    folder = RunFolder(config, resume=False)
    folder.begin(0)
    return folder


def episode(text: str = "ab", **changes: Any) -> Trajectory:
    ids = tuple(range(7, 7 + len(text)))
    said = Completion(
        token_ids=ids, logprobs=(-0.5,) * len(ids), versions=(3,) * len(ids), finish_reason=FinishReason.STOP
    )
    first = Turn(
        observation=({"role": "user", "content": text},), context_ids=(1, 2), completion=said, text=text, action=text
    )
    turns = (first, dataclasses.replace(first, context_ids=(4,)), dataclasses.replace(first, new_segment=True))
    task = Task(env_id="me/Echo-v0", seed=5, kwargs={"size": 3}, options={"row": "x"}, mixture=1)
    return Trajectory(
        **{"task": task, "episode_id": "6r2-0", "turns": turns, "stop_reason": StopReason.ENV_DONE, **changes}
    )


def lines_of(folder: RunFolder, *trajectories: Trajectory) -> list[dict[str, Any]]:
    folder.add_group(4, Group(group_id="6r2", slot=6, attempt=2, trajectories=trajectories), kind="train")
    return read_lines(folder.episodes_path)


def test_k120_missing_parents_are_made_and_the_config_is_kept(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("relax_gym.manifest.PACKAGES", (*PACKAGES, "no-such-package"))
    monkeypatch.setattr(plugins(), "sources", {"relax_gym_envs": "relax-gym", "hello": "hello-plugin 1.2"})
    folder = begun(config(tmp_path / "a" / "b"))
    assert (folder.path / "config.toml").exists()
    manifest = json.loads((folder.path / "manifest.json").read_text())
    assert manifest["environments"][0]["id"] == "relax_gym/GuessNumber-v0"
    for name in ("torch", "peft", "megatron-core", "ray"):
        assert manifest["packages"][name] == version(name)
    assert "no-such-package" not in manifest["packages"]
    assert manifest["plugins"] == {"hello": "hello-plugin 1.2"}
    assert not list(folder.path.glob("*.partial"))


def test_k116_a_used_folder_is_refused(tmp_path) -> None:
    begun(config(tmp_path / "r"))
    with pytest.raises(RunFolderError, match=r"already holds a run; continue it with --resume"):
        RunFolder(config(tmp_path / "r"), resume=False)


def test_k115_resume_takes_more_steps_but_no_other_run(tmp_path) -> None:
    run_id = begun(config(tmp_path / "r")).path / "manifest.json"
    before = run_id.read_text()
    RunFolder(config(tmp_path / "r", steps=9), resume=True).begin(0)
    assert "steps = 9" in (tmp_path / "r" / "config.toml").read_text()
    assert run_id.read_text() == before
    with pytest.raises(
        RunFolderError, match=r"holds another run \(train.group_size: 2 there, 4 here\); resume it with"
    ):
        RunFolder(config(tmp_path / "r", group_size=4), resume=True)
    with pytest.raises(RunFolderError, match=r"nothing to resume: .*new"):
        RunFolder(config(tmp_path / "new"), resume=True)


def test_a_resumed_run_may_have_another_layout_of_the_learner(tmp_path) -> None:
    def with_learner(**options) -> RunConfig:
        plain = config(tmp_path / "r")
        return plain.model_copy(update={"learner": LearnerSection(name="megatron", **options)})

    begun(with_learner(tp=2, pp=2, lr=1e-5))
    RunFolder(with_learner(dp=2, micro_batch_tokens=99, lr=1e-5), resume=True).begin(0)
    assert "dp = 2" in (tmp_path / "r" / "config.toml").read_text()
    with pytest.raises(RunFolderError, match=r"holds another run \(learner\.lr: 1e-05 there, 0\.1 here\); resume"):
        RunFolder(with_learner(lr=0.1), resume=True)


def test_a_run_that_never_began_leaves_the_folder_free(tmp_path) -> None:
    RunFolder(config(tmp_path / "r"), resume=False)
    assert list((tmp_path / "r").iterdir()) == []
    late = RunFolder(config(tmp_path / "r", group_size=4), resume=False)
    begun(config(tmp_path / "r"))
    with pytest.raises(RunFolderError, match="already holds a run"):  # another process came first
        late.begin(0)


def test_a_resumed_run_that_never_began_loses_nothing(tmp_path) -> None:
    folder = begun(config(tmp_path / "r"))
    folder.add_metrics(1, {})
    again = RunFolder(config(tmp_path / "r", steps=9), resume=True)
    assert len(read_lines(folder.metrics_path)) == 1
    assert "steps = 2" in (folder.path / "config.toml").read_text()
    again.begin(0)
    assert read_lines(folder.metrics_path) == []


def test_an_unwritable_folder_is_named(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"cannot write run folder '.*file/run': Not a directory"):
        RunFolder(config(tmp_path / "file" / "run"), resume=False)


def test_lines_later_than_the_checkpoint_are_forgotten_and_a_cut_line_too(tmp_path) -> None:
    folder = RunFolder(config(tmp_path / "r"), resume=False)
    for step in range(4):
        folder.add_metrics(step, {"x": 0.1 * step, "nan": float("nan"), "np": np.float32(0.5)})
    with folder.metrics_path.open("a") as file:
        file.write('{"step": 4, "x"')
    assert [line["step"] for line in read_lines(folder.metrics_path)] == [0, 1, 2, 3]
    folder.truncate(2)
    assert folder.metrics_path.read_text() == (
        '{"step": 0, "x": 0.0, "nan": null, "np": 0.5}\n'
        '{"step": 1, "x": 0.1, "nan": null, "np": 0.5}\n'
        '{"step": 2, "x": 0.2, "nan": null, "np": 0.5}\n'
    )


def test_episodes_are_cut_where_they_are_and_none_before_is_looked_at(tmp_path) -> None:
    folder = begun(config(tmp_path / "r"))
    written = ((1, "train"), (3, "zero_variance"), (2, "train"), (3, "late"), (2, "eval"), (2, "queued"), (3, "train"))
    for step, kind in (*written, (1, "queued")):
        folder.add_group(step, Group(group_id="6", slot=6, trajectories=(episode(),)), kind=kind)
    lines = folder.episodes_path.read_text().splitlines(keepends=True)
    folder.episodes_path.write_text("".join(["not looked at\n", *lines, '{"step": 3, "ki']))
    inode = folder.episodes_path.stat().st_ino
    folder.truncate(2)
    assert folder.episodes_path.read_text() == "".join(["not looked at\n", lines[0], lines[2], lines[4]])
    assert folder.episodes_path.stat().st_ino == inode
    folder.episodes_path.write_text(lines[0] + "broken\n" + lines[6])
    with pytest.raises(
        RunFolderError, match=rf"episodes\.jsonl, the line at byte {len(lines[0])} is not JSON: .*; repair"
    ):
        folder.truncate(2)


@pytest.mark.parametrize("block", [1, 7, 2**20])
@pytest.mark.parametrize("end", ["", "\n", "\n\n", '\n{"step": 9', '\n{"step": 9, "x": "\u00e4'])
def test_a_cut_leaves_what_the_records_say(tmp_path, monkeypatch, block: int, end: str) -> None:
    monkeypatch.setattr("relax_gym.lines.BLOCK", block)
    lines = [json.dumps({"step": step, "x": "ä" * (5 * step)}) for step in (0, 1, 2, 1, 3, 2, 4)]
    path = tmp_path / "lines.jsonl"

    def cut(step: int) -> None:
        cut_lines(path, wanted=lambda line: line["step"] <= step, settled=lambda line: line["step"] < step)

    for step in range(-1, 5):
        path.write_bytes(("\n".join(lines) + end).encode()[: -1 if end.endswith("ä") else None])
        cut(step)
        settled = max((number for number, line in enumerate(lines) if json.loads(line)["step"] < step), default=-1)
        rest = [line for line in lines[settled + 1 :] if json.loads(line)["step"] <= step]
        assert [line for line in path.read_text().split("\n") if line] == lines[: settled + 1] + rest
        assert path.read_text().endswith("\n") or step < 0
    path.write_bytes(b"")
    cut(1)
    assert path.read_bytes() == b""
    path.unlink()
    cut(1)
    assert list(tmp_path.iterdir()) == []


def test_a_cut_that_was_killed_is_made_by_the_next_one(tmp_path) -> None:
    path, lines = tmp_path / "lines.jsonl", [b'{"step": %d}\n' % step for step in (1, 3, 2, 4)]
    path.write_bytes(b"".join(lines)[: len(lines[0]) + 3])  # while the end was being replaced
    path.with_suffix(".tail").write_bytes(b"%d\n%b" % (len(lines[0]), lines[2]))
    cut_lines(path, wanted=lambda line: line["step"] <= 2, settled=lambda line: line["step"] < 2)
    assert path.read_bytes() == lines[0] + lines[2]
    assert [file.name for file in tmp_path.iterdir()] == ["lines.jsonl"]


def test_what_an_env_changes_meanwhile_can_be_written() -> None:
    shared: dict[str, Any] = {str(number): number for number in range(1000)}

    class Changes:
        """Changes the dict that it is in when it is looked at, as an env's coroutine can at any moment."""

        size = 1

        def item(self) -> int:
            shared[f"new {len(shared)}"] = 0
            return 1

    shared["changes"] = Changes()
    assert json.loads(json_text({"info": shared}))["info"]["changes"] == 1


def test_only_the_last_line_may_be_broken(tmp_path) -> None:
    folder = begun(config(tmp_path / "r"))
    folder.metrics_path.write_bytes(b'{"step": 0}\n{"step": \n\n{"step": 2}\n')
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl, line 2 is not JSON: .*; repair or delete that line"):
        read_lines(folder.metrics_path)
    with pytest.raises(RunFolderError, match="line 2"):
        RunFolder(config(tmp_path / "r"), resume=True).begin(5)
    assert folder.metrics_path.read_bytes().endswith(b'{"step": 2}\n')
    folder.metrics_path.write_bytes(b'{"step": 0}\n{"text": "\xe6\xbc')  # cut inside a character
    assert read_lines(folder.metrics_path) == [{"step": 0}]


def test_any_text_of_an_env_can_be_kept(tmp_path) -> None:
    folder = begun(config(tmp_path / "r"))
    text = "漢 \udc80 \\ud800 \ud800"
    (line,) = lines_of(folder, episode(text))
    assert line["turns"][0]["observation"][0]["content"] == text
    before = folder.episodes_path.read_bytes()
    assert "漢".encode() in before
    folder.truncate(4)
    assert folder.episodes_path.read_bytes() == before


def test_what_json_cannot_say_is_named(tmp_path) -> None:
    folder = begun(config(tmp_path / "r"))
    circle: dict[str, Any] = {}
    circle["self"] = circle
    info = {1: np.float32("nan"), "array": np.zeros(2), "huge": 1 << 99999, "set": {1}, "flag": np.True_}
    (turn, *_) = episode().turns
    (line,) = lines_of(folder, episode(turns=(dataclasses.replace(turn, info={**info, "circle": circle}),)))
    kept = line["turns"][0]["info"]
    assert "<dict>" in json.dumps(kept.pop("circle"))
    assert kept == {"1": None, "array": "<ndarray>", "huge": "<int>", "set": "<set>", "flag": True}


def test_lists_of_numbers_are_kept_as_they_are_but_for_what_json_cannot_say() -> None:
    given = [
        (1, -2),
        (0.5, -1e300),
        (1, 0.5),
        (True, 2),
        (),
        [1, 1 << 1023],
        (1, 1 << 1024),
        (1.5, math.nan, -math.inf),
    ]
    said = '[[1, -2], [0.5, -1e+300], [1, 0.5], [true, 2], [], [1, HUGE], [1, "<int>"], [1.5, null, null]]'
    assert json_text({"given": given}) == f'{{"given": {said}}}'.replace("HUGE", str(1 << 1023))


def test_a_line_is_enough_to_replay_an_episode_and_to_derive_its_masks(tmp_path) -> None:
    (line,) = lines_of(begun(config(tmp_path / "r")), episode())
    task = Task(**{key: line[key] for key in ("env_id", "seed", "kwargs", "options", "mixture")})
    assert task == episode().task
    assert [line[key] for key in ("step", "kind", "group_id", "slot", "attempt")] == [4, "train", "6r2", 6, 2]
    derived: list[list[tuple[int, int]]] = []
    for turn in line["turns"]:
        if turn["new_segment"] or not derived:
            derived.append([])
        derived[-1] += [(id, 0) for id in turn["context_ids"]] + [(id, 1) for id in turn["token_ids"]]
    assert derived == [list(zip(s.token_ids, s.loss_mask, strict=True)) for s in to_samples(episode(), "6r2")]
    assert derived[0] == [(1, 0), (2, 0), (7, 1), (8, 1), (4, 0), (7, 1), (8, 1)]


def test_other_folders_beside_the_checkpoints_are_ignored(tmp_path) -> None:
    folder = begun(config(tmp_path / "r"))
    folder.begin_checkpoint(3)
    folder.finish_checkpoint(3, keep=1)
    for name in ("step-foo", "step-000004.bak", "step-"):
        (folder.path / "checkpoints" / name).mkdir()
    assert [step for step, _ in folder.checkpoints()] == [3]


def test_checkpoints_appear_whole_or_not_at_all(tmp_path) -> None:
    folder = RunFolder(config(tmp_path / "r"), resume=False)

    (folder.begin_checkpoint(1) / "model.safetensors").write_text("half")
    assert folder.checkpoints() == []
    for step in (1, 2, 10):
        begun = folder.begin_checkpoint(step)
        assert list(begun.iterdir()) == []
        (begun / "x").write_text("ok")
        assert folder.finish_checkpoint(step, keep=2).name == f"step-{step:06d}"
    (folder.begin_checkpoint(12) / "x").write_text("killed here")
    folder.begin_checkpoint(14)
    assert {path.name for path in (folder.path / "checkpoints").iterdir()} == {
        *("step-000002", "step-000010", ".unfinished-000014")
    }
    assert [step for step, _ in folder.checkpoints()] == [2, 10]
