"""A judge that serves its own model, by any sampler."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from reward_kit import episode
from sglang_kit import ARGUMENTS, CPU_ENVIRONMENT, sglang_python

from relax_gym.config import Options
from relax_gym.context import RunContext
from relax_gym.errors import ConfigError, RelaxGymError, RewardError, SamplerError, UnknownNameError
from relax_gym.plugins import plugins
from relax_gym.registry import Component
from relax_gym.scoring import WeightedReward, close_rewards, make_reward, score
from relax_gym.testing import ScriptedSampler
from relax_gym.types import Trajectory
from relax_gym_rewards.genrm.compare import GenRMGroup
from relax_gym_rewards.genrm.judge import GenRM

SERVED: list[ScriptedSampler] = []
FOLDERS: list[Path] = []


class Broken(ScriptedSampler):
    """Does not start."""

    async def start(self) -> None:
        raise SamplerError("no device is free")


def judging(context: RunContext, options: Options) -> ScriptedSampler:
    """Gives 7 of 10 to answers with a 4 in them, else 2; what it is asked of "nothing" has no verdict."""

    def script(prompt_ids: Sequence[int], params: Any, turn: int) -> str | Exception:
        said = context.tokenizer.decode(prompt_ids)
        mark, answer = re.findall(r"<answer-([0-9a-f]{12})>\n?(.*?)\n?</answer-", said, re.DOTALL)[0]
        if "burn" in answer:
            return SamplerError("the engine burns")
        return "Hm." if "nothing" in answer else f"Hm.\nScore {mark}: {7 if '4' in answer else 2}"

    FOLDERS.append(context.run_dir)
    SERVED.append(ScriptedSampler(script, tokenizer=context.tokenizer, max_context=8192, delay=5))
    return SERVED[-1]


def broken(context: RunContext, options: Options) -> ScriptedSampler:
    SERVED.append(Broken([]))
    return SERVED[-1]


@pytest.fixture(scope="module", autouse=True)
def samplers() -> Iterator[None]:
    table = plugins().tables["sampler"]
    table.add("test_judging", Component(factory=judging, options=Options), "test")
    table.add("test_broken", Component(factory=broken, options=Options), "test")
    yield
    assert all(sampler.closed and not sampler.open_sessions for sampler in SERVED)
    assert not [thread for thread in threading.enumerate() if thread.name == "own-model"]
    assert not any(folder.exists() for folder in FOLDERS)


def judge(**options: Any) -> GenRM:
    return GenRM(**{"sampler": {"name": "test_judging"}, "model": "tiny-qwen3", "field": "", **options})


def judged(reward: Any, *answers: str) -> list[Trajectory]:
    term = WeightedReward(name="genrm", weight=1.0, reward=reward)

    async def ask() -> list[Trajectory]:
        return await asyncio.gather(*(score(episode(answer), [term], timeout=30) for answer in answers))

    try:
        return asyncio.run(ask())
    finally:
        asyncio.run(close_rewards([term], timeout=30))


def test_it_is_asked_as_an_endpoint_is() -> None:
    good, bad, silent, failed = judged(judge(), "It is 4.", "It is 5.", "nothing", "burn")
    assert (good.reward, bad.reward, silent.reward, failed.reward) == (0.7, 0.2, None, None)
    assert "without a verdict" in silent.reward_failures["genrm"]
    assert "tiny-qwen3: the engine burns" in failed.reward_failures["genrm"]


def test_what_is_sampled_with_is_in_body_and_each_sample_has_a_seed() -> None:
    body = {"top_p": 0.5, "stop": ["##"], "chat_template_kwargs": {"enable_thinking": False}}
    (found,) = judged(judge(samples=2, temperature=0.7, max_tokens=99, body=body), "4")
    assert found.reward == pytest.approx(0.7)
    params = [request.params for request in SERVED[-1].requests]
    assert sorted(one.seed or 0 for one in params) == [0, 1]
    assert all(one.stop_token_ids for one in params)
    assert {(one.temperature, one.top_p, one.stop, one.max_new_tokens) for one in params} == {(0.7, 0.5, ("##",), 99)}


def test_any_thread_and_loop_may_ask_and_closing_frees_it_until_it_is_asked_again() -> None:
    reward, found = judge(), list[Any]()

    def ask() -> None:
        found.append(asyncio.run(reward(episode(f"4 {threading.get_ident()}"))))

    reward.preflight()
    threads = [threading.Thread(target=ask) for _ in range(3)]
    before = len(SERVED)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ask()
    assert found == [0.7] * 4 and len(SERVED) == before
    reward.close()
    reward.close()
    assert SERVED[-1].closed
    assert judged(reward, "another 4")[0].reward == 0.7 and len(SERVED) == before + 1


def test_a_sampler_that_does_not_start_is_known_before_the_run() -> None:
    with pytest.raises(RelaxGymError, match="no device is free"):
        make_reward(GenRM, {"sampler": {"name": "test_broken"}, "model": "tiny-qwen3", "field": ""})


def test_messages_that_do_not_fit_and_time_that_runs_out_leave_it_unscored() -> None:
    (long,) = judged(judge(max_chars=200_000), "4 q " * 20_000)
    assert "takes 8192 tokens, and the messages are" in long.reward_failures["genrm"]
    (late,) = judged(judge(deadline=1e-9), "4")
    assert "took longer than 1e-09 s (deadline)" in late.reward_failures["genrm"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoint": "http://localhost:1/v1"}, "give an endpoint with the name of a model there, or a sampler"),
        ({"sampler": {}}, "give an endpoint with the name of a model there, or a sampler"),
        (
            {"sampler": {}, "endpoint": "http://localhost:1/v1", "model": {"name": "x"}},
            "give an endpoint with the name",
        ),
        ({"sampler": {"name": "test_judgin"}}, "did you mean 'test_judging'"),
        ({"sampler": {"name": "local", "max_slot": 3}}, "max_slots"),
        ({"model": {"nam": "x"}}, "name"),
        ({"body": {"top_q": 1}}, "body has no 'top_q'.*top_"),
        ({"body": {"top_p": 3}}, "top_p is 3"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((RewardError, ConfigError, UnknownNameError), match=message):
        judge(**options)


def check_an_untrained_judge(sampler: dict[str, Any]) -> None:
    """It answers, and what it says has no verdict."""
    model = {"name": "tiny-qwen3", "kwargs": {"max_positions": 2048}}
    reward = GenRMGroup(sampler=sampler, model=model, mode="list", orders=1, max_tokens=8)
    found = asyncio.run(reward.score_group([episode("4"), episode("5")]))
    reward.close()
    assert len(found) == 2 and all(isinstance(one, RewardError) for one in found)
    assert "without a verdict" in str(found[0])


def test_groups_are_compared_by_it_too_and_the_local_sampler_serves_a_model() -> None:
    check_an_untrained_judge({"name": "local", "max_context": 2048, "dtype": "float32", "device": "cpu"})


@pytest.mark.sglang
def test_real_sglang_serves_a_model() -> None:
    check_an_untrained_judge(
        {"name": "sglang", "server_args": ARGUMENTS, "python": sglang_python(), "env": CPU_ENVIRONMENT}
    )
