"""Episodes with media: features are made beside the event loop, and one bad image costs one episode."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import families
import pytest
from loader_kit import PIXELS, items, part, png, using

import relax_gym
from relax_gym.config import RolloutConfig
from relax_gym.features import Features
from relax_gym.media import Media
from relax_gym.media.loader import MediaLoader
from relax_gym.metrics import episode_metrics
from relax_gym.play import Episode, Player
from relax_gym.processing import MediaProcessor
from relax_gym.scoring import WeightedReward
from relax_gym.testing import ScriptedSampler
from relax_gym.types import StopReason, Task, Trajectory

pytestmark = pytest.mark.usefixtures("one_thread")


class Noted(MediaProcessor):
    """Notes which threads process."""

    def __init__(self, processor: Any) -> None:
        super().__init__(processor)
        self.threads: list[int] = []

    def _process(self, media: Media) -> Features:
        self.threads.append(threading.get_ident())
        return super()._process(media)


def test_k67_features_are_made_once_and_not_on_the_event_loop() -> None:
    processor = Noted(families.processor("qwen3_vl").processor)
    large = PIXELS.repeat(8, axis=0).repeat(8, axis=1)

    async def use(loader: MediaLoader) -> tuple[list[Media], int]:
        await asyncio.gather(*(items(loader, part("image", png(large))) for _ in range(4)))
        return await items(loader, part("image", large), part("image", png(large))), threading.get_ident()

    (first, second), loop = using(use, processor=processor)
    assert first is second
    assert len(processor.threads) == 1
    assert loop not in processor.threads
    processor.features(first)
    assert len(processor.threads) == 1


class Shows(relax_gym.Env):
    """A picture each turn; that of the second turn is broken where the seed is 2."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.broken, self.turn = seed == 2, 0
        return [self._message(png(PIXELS.repeat(8, axis=0).repeat(8, axis=1)))], {}

    def step(self, action: str) -> Any:
        self.turn += 1
        shown = self._message(png()[:-40] if self.broken else png(PIXELS.repeat(6, axis=0).repeat(6, axis=1)))
        return relax_gym.StepResult([shown], 1.0, self.turn == 2, False, {})

    def _message(self, image: bytes) -> Any:
        return {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image", "image": image}]}


if "test/Shows-v0" not in relax_gym.list():
    relax_gym.register("test/Shows-v0", Shows)


def test_k64_one_bad_image_costs_one_episode_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    renderer = families.renderer("qwen3_vl")

    async def main() -> list[Trajectory]:
        player = Player(
            sampler=ScriptedSampler(["a", "b"], tokenizer=renderer.tokenizer, max_context=10_000),
            renderer=renderer,
            rewards=[WeightedReward(name="env", weight=1.0, reward=lambda trajectory: trajectory.env_return)],
            config=RolloutConfig(),
        )
        episodes = [Episode(id=str(s), task=Task(env_id="test/Shows-v0", seed=s), seed=s) for s in range(4)]
        try:
            return await player.play(episodes, player.open_sessions(4))
        finally:
            await player.aclose()

    played = asyncio.run(main())
    assert [t.stop_reason for t in played] == [
        StopReason.ERROR if t.task.seed == 2 else StopReason.ENV_DONE for t in played
    ]
    bad = played[2]
    assert bad.error is not None
    assert bad.error.message.startswith("image bytes (")
    assert "cannot be read as an image" in bad.error.message
    assert (bad.error.env_id, bad.error.seed, bad.error.turn) == ("test/Shows-v0", 2, 1)
    assert [len(t.turns) for t in played] == [2, 2, 1, 2]
    assert episode_metrics(played)["episode/errors"] == 1
    assert "env test/Shows-v0, seed 2, turn 1: image bytes" in caplog.text
    first = [t.turns[0].media[0].media for t in played]
    assert all(item is first[0] for item in first)
