"""`rewards list | show | try` and `replay`: episodes that are over, scored again and compared."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from command import run
from fake_openai import FakeOpenAI
from reward_kit import episode
from test_genrm import mark_of, says, text_of

from relax_gym.agreement import agreement, cohen_kappa, correlation
from relax_gym.lines import append_line, read_lines
from relax_gym.plugins import plugins
from relax_gym.rescoring import trajectory_of
from relax_gym.run_folder import episode_record
from relax_gym.types import Completion, EpisodeError, FinishReason, StopReason, Trajectory


def finished(folder: Path, trajectories: Sequence[Trajectory], kind: str = "train") -> Path:
    """A run folder with these episodes, all in one group."""
    folder.mkdir(exist_ok=True)
    for step, trajectory in enumerate(trajectories):
        where = {"step": step, "kind": kind, "group_id": "g", "slot": 0, "attempt": 0}
        append_line(folder / "episodes.jsonl", {**where, **episode_record(trajectory)})
    return folder


def scored(trajectory: Trajectory, name: str, reward: float | None) -> Trajectory:
    return dataclasses.replace(trajectory, episode_id=name, rewards={"env": reward})


@pytest.fixture
def played(tmp_path: Path) -> Path:
    return finished(
        tmp_path / "run",
        [
            scored(episode("41", "It is 42.", answer="42"), "right", 0.0),
            scored(episode("43", answer="42"), "wrong", 0.0),
            scored(episode("42", answer="42"), "plain", 1.0),
            scored(episode("42"), "no-reference", None),
        ],
    )


def as_json(capsys: Any, *arguments: object) -> dict[str, Any]:
    code, out, err = run(capsys, *arguments, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


# --- agreement --------------------------------------------------------------------------------------------------------


def test_agreement_of_two_scorings_by_hand() -> None:
    found = agreement([1.0, 0.0, 1.0, 1.0, None, 0.5], [1.0, 0.0, 0.0, 1.0, 1.0, None])
    assert found.episodes == 4
    assert found.mean_difference == pytest.approx(0.25)
    assert found.accuracy == pytest.approx(0.75)
    assert found.kappa == pytest.approx(0.5)  # observed 3/4, expected (3·2 + 1·2) / 16 = 1/2
    assert found.correlation == pytest.approx(1 / 3**0.5)
    assert agreement([None], [1.0]).accuracy is None
    assert agreement([0.6, 0.8], [0.7, 0.9], threshold=0.75).accuracy == 1.0
    with pytest.raises(ValueError, match="shorter"):
        agreement([1.0], [])


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("yynn", "yynn", 1.0),
        ("yynn", "nnyy", -1.0),
        ("yyyy", "yyyy", None),
        ("yyyy", "nnnn", 0.0),
        ("y" * 25 + "n" * 25, "y" * 20 + "n" * 5 + "y" * 10 + "n" * 15, 0.4),  # the textbook table 20, 5, 10, 15
        ("abc", "abc", 1.0),
        ("", "", None),
    ],
)
def test_cohens_kappa_by_hand(first: str, second: str, expected: float | None) -> None:
    assert cohen_kappa(list(first), list(second)) == pytest.approx(expected)


def test_no_correlation_with_what_is_constant() -> None:
    assert correlation([1.0, 1.0], [0.0, 1.0]) is None
    assert correlation([1.0], [1.0]) is None
    assert correlation([0.0, 1.0], [1.0, 0.0]) == pytest.approx(-1.0)


# --- list and show ----------------------------------------------------------------------------------------------------


def test_list_names_every_reward_and_show_describes_each(capsys: Any) -> None:
    _, out, _ = run(capsys, "rewards", "list")
    for name in plugins().tables["reward"].names():
        assert f"\n{name} " in f"\n{out}"
        code, shown, _ = run(capsys, "rewards", "show", name)
        assert code == 0 and f'[[reward]]\nname = "{name}"' in shown
    assert "range: 0 or 1" in run(capsys, "rewards", "show", "numeric")[1]


def test_show_says_options_types_and_defaults_also_those_of_a_base(capsys: Any) -> None:
    _, out, _ = run(capsys, "rewards", "show", "genrm")
    lines = [line.split() for line in out.splitlines()]
    assert ["endpoint", "str", '""'] in lines
    assert any(line[:1] == ["model"] and line[-1] == "required" for line in lines)
    assert ["normalise", "bool", "true"] in lines
    assert ["json_field", "str", '"score"'] in lines
    assert "name of the environment variable that holds the key" in out
    code, _, err = run(capsys, "rewards", "show", "exact_mach")
    assert code == 1 and "did you mean 'exact_match'?" in err


# --- try --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "score"),
    [
        (("exact_match", "--answer", "Paris.", "--reference", "paris"), 1.0),
        (("exact_match", "--answer", "Paris", "--reference", "paris", "--set", "ignore_case=false"), 0.0),
        (("numeric", "--answer", "It is 3/4", "--reference", "0.75"), 1.0),
        (("numeric", "--answer", "", "--reference", "1"), 0.0),
        (("numeric", "--answer", "7", "--info", "goal=7", "--set", "field=goal"), 1.0),
    ],
)
def test_try_one_text(capsys: Any, arguments: tuple[str, ...], score: float) -> None:
    found = as_json(capsys, "rewards", "try", *arguments)
    assert found["episodes"][0]["scores"] == {arguments[0]: score}


def test_try_a_file_of_cases_against_their_labels(capsys: Any, tmp_path: Path) -> None:
    cases = [
        {"id": "a", "question": "2+2?", "answer": "4", "reference": "4", "label": True},
        {"id": "b", "answer": "5", "reference": "4", "label": 0},
        {"id": "c", "answer": "four", "reference": "4", "label": 1.0},
        {"id": "d", "answer": "4", "info": {"answer": "4"}},
        {"id": "e", "answer": "4"},
    ]
    file = tmp_path / "cases.jsonl"
    file.write_text("\n".join(map(json.dumps, cases)) + "\n\n")
    found = as_json(capsys, "rewards", "try", "exact_match", file)
    assert [e["scores"]["exact_match"] for e in found["episodes"]] == [1.0, 0.0, 0.0, 1.0, None]
    assert found["rewards"]["exact_match"] == {"scored": 4, "unscored": 1, "mean": 0.5, "min": 0.0, "max": 1.0}
    assert found["agreement"]["label"] == {
        "episodes": 3,
        "mean_difference": pytest.approx(-1 / 3),
        "correlation": pytest.approx(0.5),
        "accuracy": pytest.approx(2 / 3),
        "kappa": pytest.approx(0.4),
    }
    assert "left no 'answer' in info" in found["episodes"][4]["failures"][0]
    _, out, _ = run(capsys, "rewards", "try", "exact_match", file, "--limit", 1)
    assert "agreement with label" in out and "unscored (1): env text left no 'answer'" in out
    assert "where they differ most" in out and "four" not in out.partition("differ most")[2].splitlines()[2][-5:]


def test_try_a_run_and_compare_two_rewards(capsys: Any, played: Path) -> None:
    found = as_json(capsys, "rewards", "try", "numeric", played, "--against", "exact_match")
    columns = {e["id"]: tuple(e["scores"].values()) for e in found["episodes"]}
    assert columns == {"right": (1.0, 0.0), "wrong": (0.0, 0.0), "plain": (1.0, 1.0), "no-reference": (None, None)}
    assert found["agreement"]["exact_match (against)"]["kappa"] == pytest.approx(0.4)
    same = ["--set", "tolerance=2.0", "--against", "numeric", "--against-set", "tolerance=0.0"]
    found = as_json(capsys, "rewards", "try", "numeric", played, *same, "--step", 1)
    assert found["episodes"][0]["scores"] == {"numeric": 1.0, "numeric (against)": 0.0}
    _, out, _ = run(capsys, "rewards", "try", "numeric", played, "--against", "exact_match")
    order = [line.split()[0] for line in out.partition("differ most")[2].splitlines() if line][1:]
    assert order == ["no-reference", "right", "wrong", "plain"]


def test_replay_compares_with_what_the_run_gave(capsys: Any, played: Path) -> None:
    replayed = as_json(capsys, "replay", played, "--reward", "numeric")
    assert replayed == as_json(capsys, "rewards", "try", "numeric", played, "--against", "recorded")
    columns = {e["id"]: tuple(e["scores"].values()) for e in replayed["episodes"]}
    assert columns == {"right": (1.0, 0.0), "wrong": (0.0, 0.0), "plain": (1.0, 1.0), "no-reference": (None, None)}


def test_a_line_of_a_run_is_its_episode_again(tmp_path: Path) -> None:
    said = Completion(token_ids=(1, 2), logprobs=(-0.5, -1.0), versions=(3, 3), finish_reason=FinishReason.LENGTH)
    first = episode("41", "42", rewards=(0.25, None), answer="42", extra={"a": [1, 2]})
    turns = [dataclasses.replace(turn, completion=said, context_ids=(7,), info={"n": 1}) for turn in first.turns]
    error = EpisodeError(env_id="test/Quiz-v0", seed=0, turn=1, message="broke", traceback="…")
    whole = dataclasses.replace(
        first,
        turns=tuple(dataclasses.replace(t, observation=({"role": "user", "content": "Hi"},)) for t in turns),
        final_observation=({"role": "user", "content": "Bye"},),
        stop_reason=StopReason.ERROR,
        error=error,
    )
    (record,) = read_lines(finished(tmp_path / "run", [whole]) / "episodes.jsonl")
    assert trajectory_of(record) == whole
    older = {key: value for key, value in record.items() if key != "info"}
    assert trajectory_of(older).info == {"n": 1}, "lines without info have what the turns say"


class Two:
    """Gives two numbers, of which the first counts unless another is asked for."""

    key = "length"

    def __call__(self, trajectory: Trajectory) -> dict[str, float]:
        return {"length": float(len(trajectory.turns[-1].action)), "turns": float(len(trajectory.turns))}


def test_a_reward_of_several_numbers(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    table = plugins().tables["reward"]
    monkeypatch.setattr(table, "_values", {**table._values, "two": Two})
    monkeypatch.setattr(table, "_sources", {**table._sources, "two": "a test"})
    found = as_json(capsys, "rewards", "try", "two", "--answer", "abc")["episodes"][0]
    assert (found["scores"], found["parts"]) == ({"two": 3.0}, {"two/turns": 1.0})
    found = as_json(capsys, "rewards", "try", "two", "--answer", "abc", "--key", "turns")["episodes"][0]
    assert (found["scores"], found["parts"]) == ({"two": 1.0}, {"two/length": 3.0})


def test_an_episode_that_failed_stays_unscored(capsys: Any, tmp_path: Path) -> None:
    error = EpisodeError(env_id="test/Quiz-v0", seed=0, turn=1, message="broke", traceback="…")
    broken = dataclasses.replace(episode("42", answer="42"), error=error, stop_reason=StopReason.ERROR)
    found = as_json(capsys, "rewards", "try", "exact_match", finished(tmp_path / "run", [broken]))
    assert found["episodes"][0]["failures"] == ["the episode ended in an error: broke"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("exact_match",), "give a run folder or a JSONL file, or --answer TEXT"),
        (("exact_match", "RUN", "--answer", "x"), "give a run folder or a JSONL file, or --answer TEXT"),
        (("exact_match", "RUN", "--reference", "x"), "--reference, --question and --info are for --answer"),
        (("exact_match", "RUN", "--against-set", "a=1"), "are options of the reward that --against names"),
        (("exakt_match", "RUN"), "did you mean 'exact_match'?"),
        (("exact_match", "RUN", "--set", "feld=x"), "feld"),
        (("exact_match", "RUN", "--set", "x"), "--set 'x' is malformed"),
        (("numeric", "RUN", "--set", "tolerance=-1"), "`relax-gym rewards show numeric` lists options"),
        (("exact_match", "/nowhere"), "is neither a run folder nor a file"),
        (("exact_match", "RUN", "--kind", "eval"), "has no such episodes; it has steps 0, 1, 2, 3 of kind train"),
        (("exact_match", "EMPTY"), "is empty; give a file with one JSON object in each line"),
        (("exact_match", '{"answer": 1}'), "must be an object with a text as `answer`"),
        (("exact_match", "[]"), "must be an object with a text as `answer`"),
        (("exact_match", "{"), "line 1 is not JSON"),
        (("exact_match", '{"answer": "x", "truth": 1}'), "has 'truth'; known are question, answer"),
        (("exact_match", '{"answer": "x", "label": "yes"}'), "it must be a number, true or false"),
        (("exact_match", '{"answer": "x", "info": 1}'), "it must be an object"),
        (("exact_match", '{"turns": []}'), "is no whole episode: KeyError"),
        (("exact_match", '{"answer": "x"}', "--against", "recorded"), "have no reward of their own"),
    ],
)
def test_wrong_input_is_said(
    capsys: Any, tmp_path: Path, played: Path, arguments: tuple[str, ...], message: str
) -> None:
    file = tmp_path / "cases.jsonl"
    file.write_text("".join(text for text in arguments if text[0] in "{["))
    words = [file if word[0] in "{[" or word == "EMPTY" else played if word == "RUN" else word for word in arguments]
    code, _, err = run(capsys, "rewards", "try", *words)
    assert code in (1, 2) and message in " ".join(err.split()), err


def test_replay_of_a_file_is_refused(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("{}")
    code, _, err = run(capsys, "replay", tmp_path / "x.jsonl", "--reward", "env")
    assert code == 1 and "`relax-gym rewards try` takes files, too" in err


# --- a judge ----------------------------------------------------------------------------------------------------------


def test_a_judge_is_calibrated_on_labelled_cases(capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "cases.jsonl"
    cases = [{"answer": word, "reference": "4", "label": word == "4"} for word in ("4", "5", "4", "6")]
    file.write_text("\n".join(map(json.dumps, cases)))
    with FakeOpenAI(lambda body: says(9 if "\n4\n</answer" in text_of(body) else 2)(body)).in_thread() as server:
        where = ("--set", f"endpoint={server.url}", "--set", "model=judge")
        found = as_json(capsys, "rewards", "try", "genrm", file, *where)
        _, out, _ = run(capsys, "rewards", "try", "genrm", file, *where)
    assert found["agreement"]["label"]["kappa"] == 1.0
    assert "genrm counted" in out and "no_verdict" in out
    assert found["metrics"]["genrm"]["judged"] + found["metrics"]["genrm"]["cached"] == 4
    assert len({mark_of(body) for body in server.bodies}) == len(server.bodies)
