"""A run whose judge is a server; its episodes, scored again, get what they got. And a judge on real SGLang."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from command import run
from fake_openai import FakeOpenAI
from reward_kit import episode
from test_cli import CONFIG
from test_genrm import says, text_of

from relax_gym.errors import RewardError
from relax_gym.lines import read_lines
from relax_gym_plugins.samplers.sglang.process import ServerProcess
from relax_gym_rewards.genrm.judge import GenRM

pytest_plugins = ["sglang_fixtures"]


def by_content(body: dict[str, Any]) -> dict[str, Any]:
    """A judge whose score depends on the answer, and on nothing else."""
    said = text_of(body).splitlines()[1:-3]
    return says(sum(map(ord, "".join(said))) % 11)(body)


@pytest.mark.slow
def test_a_run_with_a_judge_is_replayed_to_the_same_scores(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAX_GYM_CACHE", str(tmp_path / "cache"))
    kwargs = {"model": "judge", "field": "", "template": "{answer}\n{verdict}", "cache": str(tmp_path / "judged")}
    with FakeOpenAI(by_content).in_thread() as server:
        kwargs["endpoint"] = server.url
        options = ", ".join(f"{key} = {json.dumps(value)}" for key, value in kwargs.items())
        text = CONFIG.replace("RUN", str(tmp_path / "run"))
        judged = f'[[reward]]\nname = "genrm"\nkwargs = {{ {options} }}\n'
        (tmp_path / "run.toml").write_text(text.replace('[[reward]]\nname = "env"\n', judged))
        assert run(capsys, "train", tmp_path / "run.toml")[0] == 0
    asked = len(server.bodies)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert sum(line.get("reward/genrm/judged", 0) + line.get("reward/genrm/cached", 0) for line in lines) > 0
    given = [part for key, value in kwargs.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    code, out, err = run(capsys, "replay", tmp_path / "run", "--reward", "genrm", *given, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert [e["scores"]["genrm"] for e in found["episodes"]] == [e["scores"]["recorded"] for e in found["episodes"]]
    assert found["rewards"]["genrm"]["scored"] == len(found["episodes"]) > 0
    assert len(server.bodies) == asked, "the server is gone: every judgement came from the cache"


@pytest.mark.sglang
def test_a_real_server_takes_the_question_and_a_judge_of_noise_scores_nothing(
    sglang_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAX_GYM_JUDGE_KEY", sglang_server.headers["Authorization"].removeprefix("Bearer "))
    where = {"endpoint": f"{sglang_server.url}/v1", "model": "judge", "key_env": "RELAX_GYM_JUDGE_KEY"}
    judge = GenRM(**where, max_tokens=8, samples=2, temperature=0.7)
    with pytest.raises(RewardError, match="2 of 2 samples without a verdict: the judge gave no verdict with mark"):
        asyncio.run(judge(episode("42", answer="42")))
