import json

import numpy as np
import pytest

from relax_gym.config import parse_config
from relax_gym.errors import RunFolderError
from relax_gym.run_folder import RunFolder, read_lines


def config(path, **train: object):
    return parse_config(
        {
            "run_dir": str(path),
            "model": {"name": "tiny-qwen3"},
            "env": [{"id": "relax_gym/GuessNumber-v0"}],
            "train": {"steps": 2, "groups_per_step": 2, "group_size": 2, **train},
        }
    )


def test_k120_missing_parents_are_made_and_the_config_is_kept(tmp_path) -> None:
    folder = RunFolder(config(tmp_path / "a" / "b"), resume=False)
    assert (folder.path / "config.toml").exists()
    manifest = json.loads((folder.path / "manifest.json").read_text())
    assert manifest["environments"][0]["id"] == "relax_gym/GuessNumber-v0"
    assert manifest["packages"]["torch"]


def test_k116_a_used_folder_is_refused(tmp_path) -> None:
    RunFolder(config(tmp_path / "r"), resume=False)
    with pytest.raises(RunFolderError, match=r"already holds a run; continue it with --resume"):
        RunFolder(config(tmp_path / "r"), resume=False)


def test_k115_resume_takes_more_steps_but_no_other_run(tmp_path) -> None:
    run_id = RunFolder(config(tmp_path / "r"), resume=False).path / "manifest.json"
    before = run_id.read_text()
    RunFolder(config(tmp_path / "r", steps=9), resume=True)
    assert run_id.read_text() == before
    with pytest.raises(
        RunFolderError, match=r"holds another run \(train: .*'group_size': 2.* there, .*'group_size': 4"
    ):
        RunFolder(config(tmp_path / "r", group_size=4), resume=True)
    with pytest.raises(RunFolderError, match=r"nothing to resume: .*new"):
        RunFolder(config(tmp_path / "new"), resume=True)


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


def test_checkpoints_appear_whole_or_not_at_all(tmp_path) -> None:
    folder = RunFolder(config(tmp_path / "r"), resume=False)

    def die(path) -> None:
        (path / "model.safetensors").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        folder.save_checkpoint(1, die, keep=2)
    assert folder.checkpoints() == []
    for step in (1, 2, 10):
        folder.save_checkpoint(step, lambda path: (path / "x").write_text("ok"), keep=2)
    assert [step for step, _ in folder.checkpoints()] == [2, 10]
