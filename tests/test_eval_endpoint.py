"""`relax-gym eval ENV --endpoint`: against a fake server that speaks HTTP."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faulty_envs  # noqa: F401 - it registers envs
import pytest
from command import run
from fake_openai import Body, FakeOpenAI

from relax_gym.config import EnvConfig
from relax_gym.endpoint.client import EndpointConfig, EndpointError
from relax_gym.endpoint.evaluate import EndpointEval, evaluate_endpoint
from relax_gym.errors import ConfigError, RunFolderError
from relax_gym.lines import read_lines
from relax_gym.tasks import TaskSource
from relax_gym.view import Wanted, read_episodes, render_episode, run_tokenizer
from relax_gym.view_html import render_page

GUESS = "relax_gym/GuessNumber-v0"


def by_seed(body: Body) -> Body:
    """A guess that follows from the seed: what a server does that samples."""
    return {"content": str(body["seed"] % 4 + 1)}


def bisecting(body: Body) -> Body:
    """The best guess after what the env has said."""
    low, high, guess = 1, 10, 0
    for message in body["messages"]:
        if message["role"] == "assistant":
            guess = int(message["content"])
        elif message["content"] == "higher":
            low = guess + 1
        elif message["content"] == "lower":
            high = guess - 1
    return {"content": str((low + high) // 2)}


@pytest.fixture
def fake() -> Iterator[FakeOpenAI]:
    with FakeOpenAI(by_seed).in_thread() as serving:
        yield serving


def evaluation(fake: FakeOpenAI, out: Path, *, retries: int = 2, **changes: Any) -> EndpointEval:
    given: dict[str, Any] = {
        "env": GUESS,
        "kwargs": {"style": "terse", "high": 4, "max_guesses": 1},
        "episodes": 6,
        "attempts": 3,
        "ks": (1, 3),
        "concurrency": 4,
        **changes,
    }
    endpoint = EndpointConfig(url=fake.url, model="m", retries=retries, backoff=0.0)
    return EndpointEval(endpoint=endpoint, out=out, **given)


def lines(out: Path) -> list[dict[str, Any]]:
    return sorted(read_lines(out / "episodes.jsonl"), key=lambda line: (line["slot"], line["attempt"]))


def without_times(results: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in results.items() if key not in ("seconds", "wall_seconds")}


# Playing -------------------------------------------------------------------------------------------------------------


def test_tasks_are_those_of_evaluation(fake: FakeOpenAI, tmp_path: Path) -> None:
    evaluate_endpoint(evaluation(fake, tmp_path, episodes=3, seed=2))
    held_out = TaskSource([EnvConfig(id=GUESS)], seed=5, eval_episodes=5).eval_tasks()
    assert [line["seed"] for line in lines(tmp_path)] == [task.seed for task in held_out[2:] for _ in range(3)]


def test_attempts_differ_and_are_counted(fake: FakeOpenAI, tmp_path: Path) -> None:
    results = evaluate_endpoint(evaluation(fake, tmp_path))
    kept = lines(tmp_path)
    assert len(kept) == 18
    assert len({body["seed"] for body in fake.bodies}) == 18
    by_task = [[line["correct"] for line in kept if line["slot"] == slot] for slot in range(6)]
    assert results["accuracy"]["mean"] == pytest.approx(sum(map(sum, by_task)) / 18)
    assert results["pass@k"]["3"]["mean"] == pytest.approx(sum(map(any, by_task)) / 6)
    assert 0 < results["accuracy"]["mean"] < results["pass@k"]["3"]["mean"]
    assert results["reward"]["mean"] == results["accuracy"]["mean"]
    assert (results["prompt_tokens"], results["completion_tokens"]) == (180, 54)
    assert json.loads((tmp_path / "results.json").read_text())["results"] == results


def test_turns_follow_each_other(fake: FakeOpenAI, tmp_path: Path) -> None:
    fake.answer = bisecting
    results = evaluate_endpoint(evaluation(fake, tmp_path, kwargs={"style": "terse"}, attempts=1, ks=(1,)))
    assert results["accuracy"]["mean"] == 1.0
    assert results["turns"] > 1
    turns = lines(tmp_path)[0]["turns"]
    assert [turn["action"] for turn in turns] == [turn["text"] for turn in turns]


def test_turns_have_a_limit(fake: FakeOpenAI, tmp_path: Path) -> None:
    fake.answer = lambda body: {"content": "99"}
    results = evaluate_endpoint(evaluation(fake, tmp_path, kwargs={"max_guesses": 5}, max_turns=2))
    assert results["stop"] == {"max_turns": 18}


def test_no_more_than_the_concurrency_at_once(fake: FakeOpenAI, tmp_path: Path) -> None:
    evaluate_endpoint(evaluation(fake, tmp_path, concurrency=3))
    assert fake.most_at_once <= 3


def test_seeds_can_be_left_out(fake: FakeOpenAI, tmp_path: Path) -> None:
    fake.answer = bisecting
    evaluate_endpoint(evaluation(fake, tmp_path, send_seed=False))
    assert not any("seed" in body for body in fake.bodies)


def test_tools_are_offered_and_called(fake: FakeOpenAI, tmp_path: Path) -> None:
    def calculating(body: Body) -> Body:
        last = body["messages"][-1]
        if last["role"] == "tool":
            return {"content": last["content"], "reasoning_content": "The tool said so."}
        expression = re.search(r"What is (.*)\? Use", last["content"])
        assert expression is not None
        arguments = json.dumps({"expression": expression.group(1)})
        call = {"id": "call_abc", "type": "function", "function": {"name": "calculate", "arguments": arguments}}
        return {"content": None, "tool_calls": [call]}

    fake.answer = calculating
    results = evaluate_endpoint(evaluation(fake, tmp_path, env="relax_gym/Calculator-v0", kwargs={}))
    assert results["accuracy"]["mean"] == 1.0
    assert {body["tools"][0]["function"]["name"] for body in fake.bodies} == {"calculate"}
    assert lines(tmp_path)[0]["turns"][1]["text"].startswith("<think>The tool said so.</think>\n")


def test_images_are_sent_and_kept(fake: FakeOpenAI, tmp_path: Path) -> None:
    fake.answer = lambda body: {"content": "up"}
    evaluate_endpoint(
        evaluation(
            fake, tmp_path, env="relax_gym/ImageGrid-v0", kwargs={}, episodes=1, attempts=1, ks=(1,), max_turns=1
        )
    )
    parts = [part for part in fake.bodies[0]["messages"][-1]["content"] if part["type"] == "image_url"]
    assert parts[0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert list((tmp_path / "media").glob("*.png"))
    assert "data:image/png;base64," in render_page(tmp_path, read_episodes(tmp_path, Wanted()), None)


ROWS = [{"prompt": f"{n} + 0?", "answer": str(n)} for n in range(20)]


@pytest.mark.parametrize(("all_rows", "played"), [(False, 2), (True, 20)])
def test_rows_are_those_held_out_or_all(fake: FakeOpenAI, tmp_path: Path, caplog, all_rows: bool, played: int) -> None:
    data = {"env": "relax_gym/Dataset-v0", "kwargs": {"rows": ROWS, "match": "exact"}, "all_rows": all_rows}
    results = evaluate_endpoint(evaluation(fake, tmp_path, episodes=99, **data))
    assert results["tasks"] == played
    assert ("has 2 held-out rows" in caplog.text) != all_rows
    if not all_rows:
        held_out = TaskSource([EnvConfig(id=data["env"], kwargs=data["kwargs"])], seed=0, eval_episodes=9).eval_tasks()
        asked = [line["turns"][0]["observation"][0]["content"] for line in lines(tmp_path)[::3]]
        assert asked == [task.options["row"]["prompt"] for task in held_out if task.options is not None]


def test_rewards_can_be_chosen(fake: FakeOpenAI, tmp_path: Path) -> None:
    evaluate_endpoint(evaluation(fake, tmp_path, rewards=("env",)))
    assert lines(tmp_path)[0]["rewards"].keys() == {"env"}
    with pytest.raises(ConfigError, match="unknown reward 'envy'; did you mean 'env'"):
        evaluate_endpoint(evaluation(fake, tmp_path / "other", rewards=("envy",)))
    assert not (tmp_path / "other").exists()


# Faults --------------------------------------------------------------------------------------------------------------


def test_faults_that_pass_change_nothing(fake: FakeOpenAI, tmp_path: Path) -> None:
    whole = evaluate_endpoint(evaluation(fake, tmp_path / "a", concurrency=1))
    fake.faults = [None, 500, (429, 0), None, "drop", "no json", None, {"choices": [{}]}]
    faulty = evaluate_endpoint(evaluation(fake, tmp_path / "b", concurrency=1))
    assert without_times(faulty) == without_times(whole)


def test_failed_requests_are_errors_and_no_zeros(fake: FakeOpenAI, tmp_path: Path) -> None:
    whole = evaluate_endpoint(evaluation(fake, tmp_path / "a", concurrency=1))
    fake.faults = [None, 500, 500, 500]
    results = evaluate_endpoint(evaluation(fake, tmp_path / "b", concurrency=1))
    assert results["errors"] == {"request": 1, "env": 0}
    failed = lines(tmp_path / "b")[1]
    assert (failed["fault"], failed["reward"], failed["correct"], failed["stop_reason"]) == (
        "request",
        None,
        None,
        "error",
    )
    assert "answered 500: scripted 500 (tried 3 times" in failed["error"]["message"]
    assert results["pass@k"]["3"]["tasks"] == whole["pass@k"]["3"]["tasks"] - 1
    resumed = evaluate_endpoint(evaluation(fake, tmp_path / "b"), resume=True)
    assert without_times(resumed) == without_times(whole)


@pytest.mark.parametrize("status", [401, 400, 404])
def test_a_refusal_of_the_first_request_ends_all(fake: FakeOpenAI, tmp_path: Path, status: int) -> None:
    fake.faults = [status] * 4
    with pytest.raises(EndpointError, match=f"answered {status}: scripted {status}"):
        evaluate_endpoint(evaluation(fake, tmp_path))
    assert len(fake.bodies) <= 4


def test_a_refusal_of_one_request_is_an_error_of_one_episode(fake: FakeOpenAI, tmp_path: Path) -> None:
    fake.faults = [None, 400]
    results = evaluate_endpoint(evaluation(fake, tmp_path, concurrency=1))
    assert results["errors"] == {"request": 1, "env": 0}


def test_a_server_that_is_gone_ends_all(fake: FakeOpenAI, tmp_path: Path) -> None:
    fake.faults = [None, *[500] * 99]
    with pytest.raises(EndpointError, match="16 requests in a row have failed; continue with --resume"):
        evaluate_endpoint(evaluation(fake, tmp_path, concurrency=1, retries=0))


def test_a_conversation_that_is_too_long_ends_its_episode_only(fake: FakeOpenAI, tmp_path: Path) -> None:
    fake.answer = lambda body: {"content": "9"}
    fake.refuse = lambda body: "maximum context length is 2 messages" if len(body["messages"]) > 2 else None
    results = evaluate_endpoint(evaluation(fake, tmp_path, kwargs={"high": 99, "low": 90, "max_guesses": 5}))
    assert results["stop"] == {"token_budget": 18}
    assert results["errors"] == {"request": 0, "env": 0}


def test_max_tokens_beyond_the_context_are_no_zeros(fake: FakeOpenAI, tmp_path: Path) -> None:
    fake.refuse = lambda body: "Requested token count exceeds the model's maximum context length of 4096 tokens."
    with pytest.raises(EndpointError, match="a smaller --max-tokens leaves more room"):
        evaluate_endpoint(evaluation(fake, tmp_path))


def test_k80_an_unknown_tool_is_answered_as_in_training(fake: FakeOpenAI, tmp_path: Path) -> None:
    def lost(body: Body) -> Body:
        if body["messages"][-1]["role"] == "tool":
            return {"content": "0"}
        call = {"id": "call_abc", "type": "function", "function": {"name": "solve", "arguments": "{}"}}
        return {"content": None, "tool_calls": [call]}

    fake.answer = lost
    evaluate_endpoint(evaluation(fake, tmp_path, env="relax_gym/Calculator-v0", kwargs={}))
    assert "unknown tool 'solve'" in fake.bodies[-1]["messages"][-1]["content"]


def test_a_failing_env_is_an_error_of_its_own(fake: FakeOpenAI, tmp_path: Path) -> None:
    results = evaluate_endpoint(evaluation(fake, tmp_path, env="test/Faulty-v0", kwargs={"fault": "step"}))
    assert results["errors"] == {"request": 0, "env": 18}
    assert "KeyError: 'lost item'" in lines(tmp_path)[0]["error"]["message"]
    assert results["reward"] is None


def test_a_wrong_argument_of_the_env_is_refused_before_anything_is_asked(fake: FakeOpenAI, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="takes no argument 'hihg'; did you mean 'high'"):
        evaluate_endpoint(evaluation(fake, tmp_path, kwargs={"hihg": 4}))
    assert fake.bodies == []


# Folder --------------------------------------------------------------------------------------------------------------


def test_resume_gives_the_results_of_an_uninterrupted_run(fake: FakeOpenAI, tmp_path: Path) -> None:
    whole = evaluate_endpoint(evaluation(fake, tmp_path / "a"))
    evaluate_endpoint(evaluation(fake, tmp_path / "b"))
    file = tmp_path / "b" / "episodes.jsonl"
    kept = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(kept[:7]) + kept[7][:40])  # as a kill in the middle of a line leaves it
    fake.bodies.clear()
    resumed = evaluate_endpoint(evaluation(fake, tmp_path / "b", concurrency=1), resume=True)
    assert without_times(resumed) == without_times(whole)
    assert len(fake.bodies) == 11


def test_another_evaluation_is_not_resumed(fake: FakeOpenAI, tmp_path: Path) -> None:
    evaluate_endpoint(evaluation(fake, tmp_path))
    with pytest.raises(RunFolderError, match="holds a run already; continue it with --resume"):
        evaluate_endpoint(evaluation(fake, tmp_path))
    with pytest.raises(RunFolderError, match=r"\(env.kwargs.high: 4 there, 5 here; eval.attempts: 3 there, 4 here\)"):
        changed = evaluation(fake, tmp_path, attempts=4, kwargs={"style": "terse", "high": 5, "max_guesses": 1})
        evaluate_endpoint(changed, resume=True)


def test_view_shows_the_episodes(fake: FakeOpenAI, tmp_path: Path) -> None:
    evaluate_endpoint(evaluation(fake, tmp_path))
    (shown,) = read_episodes(tmp_path, Wanted(episode="task-1-attempt-2"))
    text = render_episode(shown, run_tokenizer(tmp_path)).plain
    assert "user: guess 1-4" in text
    assert f"model: {shown['turns'][0]['text']}" in text
    assert "text only  finish stop" in text
    assert "stop env_done" in text


# Command line --------------------------------------------------------------------------------------------------------


def arguments(fake: FakeOpenAI, out: Path) -> list[object]:
    env = [GUESS, "--set", "style=terse", "--set", "high=4", "--set", "max_guesses=1"]
    return [*env, "--endpoint", fake.url, "--model", "m", "--out", out, "--episodes", 4]


def test_command(capsys, fake: FakeOpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret")
    fake.key = "sk-secret"
    options = ["--attempts", 2, "--k", "1,2", "--temperature", 0.7, "--max-tokens", 9, "--body", "top_p=0.9"]
    code, out, err = run(capsys, "eval", *arguments(fake, tmp_path), *options, "--key-env", "MY_KEY")
    assert code == 0, err
    rows = [line.split() for line in out.splitlines()]
    assert [row[0] for row in rows[2:6]] == ["reward", "accuracy", "pass@1", "pass@2"]
    assert rows[2][3] == "4"
    assert rows[-1][:4] == ["8", "0", "0", "0"]
    asked = {key: fake.bodies[0][key] for key in ("model", "temperature", "max_tokens", "top_p")}
    assert asked == {"model": "m", "temperature": 0.7, "max_tokens": 9, "top_p": 0.9}
    written = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert b"sk-secret" not in written
    assert "sk-secret" not in out + err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--checkpoint", "3"], "--checkpoint is of a run of ours"),
        (["--k", "1,x"], "'x' is no positive number"),
        (["--k", "8"], "--k 8 with --attempts 1: pass@k needs at least k attempts"),
        (["--body", "messages=1"], "--body messages=… is set by the evaluation itself"),
        (["--set", "high"], "--set 'high' is malformed"),
        (["--key-env", "NO_SUCH_KEY"], "the environment variable is not set"),
    ],
)
def test_wrong_options(capsys, fake: FakeOpenAI, tmp_path: Path, options: list[str], message: str) -> None:
    code, _, err = run(capsys, "eval", *arguments(fake, tmp_path), *options)
    assert code in (1, 2)
    assert message in " ".join(err.split())
    assert fake.bodies == []


def test_options_of_endpoints_need_one(capsys) -> None:
    code, _, err = run(capsys, "eval", "run.toml", "--attempts", 3)
    assert code == 2
    assert "--attempts is for --endpoint URL only" in err


def test_a_killed_command_is_resumed(capsys, fake: FakeOpenAI, tmp_path: Path) -> None:
    asked = [*arguments(fake, tmp_path / "a"), "--attempts", 4]
    assert run(capsys, "eval", *asked)[0] == 0
    killed = [str(one) for one in [*arguments(fake, tmp_path / "b"), "--attempts", 4]]
    fake.faults = [*[None] * 5, *["hang"] * 99]
    command = subprocess.Popen([sys.executable, "-m", "relax_gym", "eval", *killed], stderr=subprocess.PIPE, text=True)
    fake.wait_for(len(fake.bodies) + 6)
    command.send_signal(signal.SIGINT)
    _, said = command.communicate()
    assert command.returncode == 130
    assert f"interrupted; what is finished is in {tmp_path / 'b'}: the same command with --resume goes on" in said
    fake.faults.clear()
    assert run(capsys, "eval", *killed, "--resume")[0] == 0
    first, second = (json.loads((tmp_path / name / "results.json").read_text())["results"] for name in "ab")
    assert without_times(first) == without_times(second)
