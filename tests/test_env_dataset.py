"""DatasetEnv: where rows come from, what is refused, and that nobody can change them."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

import relax_gym
from relax_gym.errors import ConfigError, EnvError
from relax_gym_envs.dataset import DatasetEnv

ROWS = [{"prompt": "1 + 1?", "answer": "2", "extra": [1]}, {"prompt": "2 + 2?", "answer": "#### 4"}]


def write(folder: Path, rows: list[Any], name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return str(path)


def refused(**kwargs: Any) -> str:
    """The message of the ConfigError that these constructor arguments cause."""
    with pytest.raises(ConfigError) as error:
        relax_gym.make("relax_gym/Dataset-v0", **kwargs)
    return str(error.value)


def test_seed_picks_the_row_and_info_carries_it() -> None:
    env = DatasetEnv(rows=ROWS, system="Be brief.")
    observation, info = env.reset(seed=5)
    assert observation == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    assert info == {"answer": "#### 4", "row": {"prompt": "2 + 2?", "answer": "#### 4"}}
    assert env.step("4") == ([], 0.0, True, False, info)
    assert env.reset(seed=4)[0][1]["content"] == "1 + 1?"


def test_options_pick_the_row() -> None:
    env = DatasetEnv(rows=ROWS)
    observation, info = env.reset(seed=0, options={"row": {"prompt": "3?", "answer": 3}})
    assert observation == [{"role": "user", "content": "3?"}]
    assert info["answer"] == 3
    assert env.reset(seed=0, options={})[0][0]["content"] == "1 + 1?"
    with pytest.raises(ConfigError, match=r"^options\['row'\]: field 'answer' is missing\. Known: prompt$"):
        env.reset(seed=0, options={"row": {"prompt": "3?"}})


@pytest.mark.parametrize(
    ("match", "answer", "action", "reward"),
    [
        ("none", "Paris", "Paris", 0.0),
        ("exact", "Paris", " PARIS\n", 1.0),
        ("exact", "Paris", "Paris.", 0.0),
        ("exact", 12, "12", 1.0),
        ("numeric", "so #### 1,200", "It is 1200.0", 1.0),
        ("numeric", -3, "-3", 1.0),
        ("numeric", 3, "3 or 4", 0.0),
        ("numeric", 3, "three", 0.0),
    ],
)
def test_match(match: str, answer: Any, action: str, reward: float) -> None:
    env = DatasetEnv(rows=[{"prompt": "?", "answer": answer}], match=match)
    env.reset(seed=0)
    result = env.step(action)
    assert (result.reward, result.terminated) == (reward, True)
    assert type(result.reward) is float
    assert result.info.get("correct") == (None if match == "none" else reward == 1.0)


def test_numeric_match_refuses_an_answer_without_a_number() -> None:
    with pytest.raises(EnvError, match=r"^row 1: match = 'numeric' but 'answer' has no number"):
        DatasetEnv(rows=[{"prompt": "?", "answer": "three"}], match="numeric").reset(seed=0)


def test_chat_prompts_keep_their_own_system_message() -> None:
    prompt = [{"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    env = DatasetEnv(rows=[{"q": prompt}], prompt_field="q", answer_field="", system="other")
    assert env.reset(seed=0) == (prompt, {"answer": None, "row": {"q": prompt}})


def test_jsonl_is_read_once_until_it_changes(tmp_path: Path) -> None:
    path = write(tmp_path, ROWS)
    first, second = DatasetEnv(path=path), DatasetEnv(path=path)
    assert first.rows == ROWS
    assert second.rows is first.rows
    write(tmp_path, ROWS[:1])
    os.utime(path, ns=(1, 1))
    assert DatasetEnv(path=path).rows == ROWS[:1]


def test_jsonl_with_bom_blank_and_windows_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes('\ufeff{"prompt": "a\u2028b", "answer": "é"}\r\n\r\n{"prompt": "c", "answer": "d"}'.encode())
    assert DatasetEnv(path=str(path)).rows == [{"prompt": "a\u2028b", "answer": "é"}, {"prompt": "c", "answer": "d"}]


def test_parquet(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"prompt": [{"role": "user", "content": "hi"}], "answer": 3}]
    path = str(tmp_path / "rows.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert DatasetEnv(path=path).reset(seed=0) == (rows[0]["prompt"], {"answer": 3, "row": rows[0]})
    (tmp_path / "broken.parquet").write_bytes(b"no parquet")
    assert refused(path=str(tmp_path / "broken.parquet")).startswith(f"cannot read {tmp_path}/broken.parquet: ")


def test_hugging_face_folder(tmp_path: Path) -> None:
    import datasets

    one, two = datasets.Dataset.from_list(ROWS[1:]), datasets.Dataset.from_list([{"prompt": "t", "answer": "u"}])
    one.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=one, test=two).save_to_disk(str(tmp_path / "both"))
    assert DatasetEnv(dataset=str(tmp_path / "one")).reset(seed=0)[0][0]["content"] == "2 + 2?"
    env = DatasetEnv(dataset=str(tmp_path / "both"), split="test")
    assert env.reset(seed=3)[0][0]["content"] == "t"
    assert env.random_action() == "u"
    both = str(tmp_path / "both")
    assert refused(dataset=both, split="tset") == (
        f"data set {both!r} has no split 'tset'; did you mean 'test'? Known: train, test"
    )
    assert refused(dataset=both, answer_field="anwser") == (
        f"data set {both!r}, row 1: field 'anwser' is missing; did you mean 'answer'? Known: prompt, answer"
    )


def test_hugging_face_folder_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    write(tmp_path / "data", ROWS[1:], "train.jsonl")
    assert DatasetEnv(dataset=str(tmp_path / "data")).reset(seed=0)[1]["answer"] == "#### 4"


def test_wrong_rows_are_named_before_anything_else(tmp_path: Path) -> None:
    path = write(tmp_path, [*ROWS, {"prompt": "x", "anwser": "y"}])
    assert refused(path=path) == (
        f"{path}, row 3: field 'answer' is missing; did you mean 'anwser'? Known: prompt, anwser"
    )
    path = write(tmp_path, [{"prompt": None, "answer": "y"}], "null.jsonl")
    assert refused(path=path).startswith(f"{path}, row 1: field 'prompt' is null")
    path = write(tmp_path, [["prompt"]], "list.jsonl")
    assert refused(path=path) == f"{path}, row 1 is ['prompt']; a row must be an object with fields"
    path = write(tmp_path, [{"prompt": [{"role": "robot", "content": ""}], "answer": ""}], "role.jsonl")
    assert refused(path=path).startswith(
        f"{path}, row 1: field 'prompt' is neither a string nor messages: message 0 has role 'robot'"
    )
    path = write(tmp_path, [{"prompt": 3, "answer": ""}], "number.jsonl")
    assert refused(path=path).startswith(
        f"{path}, row 1: field 'prompt' is neither a string nor messages: an observation"
    )


def test_wrong_files_and_arguments(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a", "answer": "b"}\n\n{"prompt": ', encoding="utf-8")
    assert refused(path=str(bad)).startswith(f"{bad}, line 3 is not JSON: ")
    bad.write_bytes(b"\xff\xfe\xff")
    assert refused(path=str(bad)).startswith(f"cannot read {bad}: ")
    bad.write_text("\n", encoding="utf-8")
    assert refused(path=str(bad)) == f"{bad} has no rows; at least one is needed"
    csv = write(tmp_path, [], "rows.csv")
    assert refused(path=csv) == f"{csv}: cannot read '.csv' files; allowed: .jsonl, .parquet"
    assert refused(path="no/such.jsonl") == (
        "data set file 'no/such.jsonl' does not exist; give a .jsonl or .parquet file"
    )
    assert refused() == "got no rows; give exactly one of path, rows and dataset"
    assert refused(rows=ROWS, path="x") == "got path and rows; give exactly one of path, rows and dataset"
    assert refused(rows=[]) == "rows has no rows; at least one is needed"
    assert refused(rows=ROWS, match="numerik") == (
        "match is 'numerik'; did you mean 'numeric'? Known: none, exact, numeric"
    )
    assert refused(rows=[{"prompt": ""}], answer_field="", match="exact").startswith(
        "match = 'exact' needs answer_field"
    )


def test_tasks_are_one_for_each_row(tmp_path: Path) -> None:
    tasks = DatasetEnv.tasks(path=write(tmp_path, ROWS), match="exact")
    assert len(tasks) == 2
    assert tasks[1] == {"row": ROWS[1]}
    assert tasks[-1:] == [{"row": ROWS[1]}]
    assert [DatasetEnv(rows=ROWS).reset(seed=9, options=dict(task))[0][0]["content"] for task in tasks] == [
        "1 + 1?",
        "2 + 2?",
    ]
    assert pickle.loads(pickle.dumps(tasks))[0] == {"row": ROWS[0]}


def test_k46_episodes_cannot_change_the_rows_or_each_other(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "answer": ["a"]}
    path = write(tmp_path, [row])
    options = DatasetEnv.tasks(path=path)[0]
    group = [DatasetEnv(path=path) for _ in range(3)]
    for index, env in enumerate(group):
        by_options = {"options": options} if index < 2 else {}
        observation, info = env.reset(seed=0, **by_options)
        assert observation == row["prompt"]
        observation[0]["content"].append({"type": "image", "image": "one more"})
        info["row"]["prompt"].append("x")
        info["answer"].append("b")
        result = env.step("a")
        assert result.info == {"answer": ["a"], "row": row}
        result.info["row"].clear()
    assert options == {"row": row}
    DatasetEnv.tasks(path=path)[0]["row"].clear()
    assert DatasetEnv.tasks(path=path)[0] == {"row": row}


def test_state_leaves_the_rows_behind() -> None:
    rows = [{"prompt": "x" * 1000, "answer": str(index)} for index in range(1000)]
    env, other = DatasetEnv(rows=rows, match="exact"), DatasetEnv(rows=rows, match="exact")
    env.reset(seed=7)
    saved = pickle.dumps(env.get_state())
    assert len(saved) < 20_000
    other.reset(seed=1)
    other.set_state(pickle.loads(saved))
    assert other.step("7").reward == 1.0


# Media ---------------------------------------------------------------------------------------------------------------


def content(env: DatasetEnv, seed: int = 0) -> Any:
    return env.reset(seed=seed)[0][0]["content"]


def test_media_fields_come_before_the_prompt_or_where_it_marks_them(tmp_path: Path) -> None:
    rows = [
        {"prompt": "Which?", "answer": "a", "photo": "cat.png", "sound": None},
        {
            "prompt": "<image>Is this like <image>? <audio>",
            "answer": "b",
            "photo": ["a.png", "/b.png"],
            "sound": "c.wav",
        },
        {"prompt": "Plain <image> text", "answer": "c"},
    ]
    env = DatasetEnv(path=write(tmp_path, rows), media={"image": "photo", "audio": "sound"})
    assert content(env, 0) == [
        {"type": "image", "image": str(tmp_path / "cat.png")},
        {"type": "text", "text": "Which?"},
    ]
    assert content(env, 1) == [
        {"type": "image", "image": str(tmp_path / "a.png")},
        {"type": "text", "text": "Is this like "},
        {"type": "image", "image": "/b.png"},
        {"type": "text", "text": "? "},
        {"type": "audio", "audio": str(tmp_path / "c.wav")},
    ]
    assert content(env, 2) == "Plain <image> text"
    same = {"prompt": "?", "answer": "", "photo": "https://example.org/cat.png"}
    assert content(DatasetEnv(rows=[same], media={"image": "photo"}))[0]["image"] == same["photo"]


def test_markers_that_do_not_fit_the_row_are_refused() -> None:
    env = DatasetEnv(rows=[{"prompt": "<image> and <image>", "answer": "", "photo": "a.png"}], media={"image": "photo"})
    with pytest.raises(EnvError, match=r"^the prompt marks image, image, but the row has image$"):
        env.reset(seed=0)
    assert refused(rows=ROWS, media={"picture": "photo"}).startswith("media is 'picture'")


def test_images_of_a_data_set_stay_encoded(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    from PIL import Image

    rows = {"prompt": ["Which?"], "answer": ["a"], "photo": [Image.new("RGB", (3, 2), "red")]}
    table = datasets.Dataset.from_dict(rows).cast_column("photo", datasets.Image())
    table.save_to_disk(str(tmp_path / "saved"))
    part = content(DatasetEnv(dataset=str(tmp_path / "saved"), media={"image": "photo"}))[0]
    assert part["type"] == "image"
    assert part["image"]["bytes"].startswith(b"\x89PNG")
