"""Envs inside Gymnasium's own wrappers, which forward no attribute, played the way training and warm-up play them."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import families
import pytest
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, RecordEpisodeStatistics, TimeLimit, TransformReward

import relax_gym
from relax_gym.actor import Actor
from relax_gym.chat import ChatRenderer
from relax_gym.config import ChatConfig, RolloutConfig, parse_config
from relax_gym.play import Episode, Player
from relax_gym.preflight import probe_envs
from relax_gym.scoring import WeightedReward
from relax_gym.testing import ScriptedSampler, check_env, tiny_tokenizer
from relax_gym.types import StopReason, Task, Trajectory
from relax_gym_envs.catalog import ENVS

TOKENIZER = tiny_tokenizer()
RENDERER = ChatRenderer(TOKENIZER)
ROWS = [{"prompt": f"{n} + {n}?", "answer": str(2 * n)} for n in range(2, 7)]
KWARGS: dict[str, dict[str, Any]] = {
    "relax_gym/Dataset-v0": {"rows": ROWS, "match": "exact"},
    "relax_gym/AudioQuestion-v0": {"rate": families.RATE},
    "relax_gym/OmniQuestion-v0": {"rate": families.RATE, "frames": 3, "fps": 4.0},
}
SHOWING = ("Audio", "Video", "Omni", "Image", "Chart", "Zoom", "GymRender")


@functools.cache
def omni_renderer() -> ChatRenderer:
    omni = families.renderer("qwen2_5_omni")
    return ChatRenderer(omni.tokenizer, ChatConfig(tool_role="user"), processor=omni.processor)


def renderer_of(id: str) -> ChatRenderer:
    """One that reads all that the env shows."""
    return omni_renderer() if id.partition("/")[2].startswith(SHOWING) else RENDERER


def wrapped(id: str, **kwargs: Any) -> Any:
    env: Any = relax_gym.make(id, **kwargs)
    return RecordEpisodeStatistics(TimeLimit(OrderEnforcing(PassiveEnvChecker(env)), max_episode_steps=60))


def wrapped_id(id: str) -> str:
    return id.replace("relax_gym/", "wrapped/")


for name in ENVS:
    if wrapped_id(name) not in relax_gym.list():
        relax_gym.register(wrapped_id(name), functools.partial(wrapped, name))


def make_player(id: str, script: Any = ()) -> Player:
    renderer = renderer_of(id)
    return Player(
        sampler=ScriptedSampler(script, tokenizer=renderer.tokenizer, max_context=100_000),
        renderer=renderer,
        rewards=[WeightedReward(name="env", weight=1.0, reward=lambda trajectory: trajectory.env_return)],
        config=RolloutConfig(max_turns=60, max_new_tokens=2000),
    )


def demonstrated(id: str, kwargs: dict[str, Any]) -> Trajectory:
    """An episode of the env's expert."""

    async def main() -> Trajectory:
        episode = Episode(id="e", task=Task(env_id=id, seed=3, kwargs=kwargs), seed=0)
        actor = lambda driver, seed: Actor(functools.partial(driver.act, "expert_action"), renderer_of(id))  # noqa: E731
        return (await make_player(id).demonstrate([episode], actor))[0]

    return asyncio.run(main())


def played(id: str, kwargs: dict[str, Any], answers: list[str]) -> Trajectory:
    """An episode of a policy, scored."""

    async def main() -> Trajectory:
        player = make_player(id, answers)
        episode = Episode(id="e", task=Task(env_id=id, seed=3, kwargs=kwargs), seed=0)
        return (await player.play([episode], player.open_sessions(1)))[0]

    return asyncio.run(main())


@pytest.mark.parametrize("id", sorted(ENVS.keys() - {"relax_gym/GymRender-v0"}))  # it has no expert
def test_a_wrapped_env_is_played_as_the_bare_one(id: str) -> None:
    kwargs = KWARGS.get(id, {})
    bare, inside = demonstrated(id, kwargs), demonstrated(wrapped_id(id), kwargs)
    again = played(wrapped_id(id), kwargs, [turn.text for turn in bare.turns])
    for trajectory in (inside, again):
        assert (trajectory.error, trajectory.stop_reason) == (None, StopReason.ENV_DONE)
        assert [turn.context_ids for turn in trajectory.turns] == [turn.context_ids for turn in bare.turns]
        assert [turn.reward for turn in trajectory.turns] == [turn.reward for turn in bare.turns]
    assert again.reward == pytest.approx(inside.info["episode"]["r"])


def test_the_tools_of_a_wrapped_env_are_shown() -> None:
    prompt = TOKENIZER.decode(list(demonstrated("wrapped/Calculator-v0", {}).turns[0].context_ids))
    assert '"name": "calculate"' in prompt
    train = {"steps": 1, "groups_per_step": 1, "group_size": 2}
    env = {"id": "wrapped/Calculator-v0"}
    config = parse_config({"run_dir": "r", "model": {"name": "m"}, "env": [env], "train": train})
    assert [tool["function"]["name"] for tool in probe_envs(config)[0].tools] == ["calculate"]


def test_the_contract_checker_sees_through_gymnasiums_wrappers() -> None:
    def halved() -> Any:
        return TransformReward(relax_gym.make("relax_gym/Calculator-v0"), lambda reward: reward / 2)

    results = {result.name: result for result in check_env(halved)}
    assert [name for name, result in results.items() if not result.passed] == []
    assert results["tools"].detail == "calculate"
    assert results["expert_action"].detail == "2 turns, ended, return 0.5"
    assert results["state"].detail == "resumed episodes go on the same way"
