"""Images and videos on a real SGLang server, in any turn: its log-probs are those of one plain forward, after new
weights too."""

from __future__ import annotations

import asyncio
from pathlib import Path

import families
import numpy as np
import pytest
import torch
from media_kit import image
from sglang_kit import CPU_ARGUMENTS, CPU_ENVIRONMENT, sglang_python
from test_media_sampling import Plan, Played, check, episodes

from relax_gym.config import RunConfig
from relax_gym.context import RunContext
from relax_gym.media.items import Video
from relax_gym.models import load_language_model
from relax_gym_plugins.samplers.sglang.options import SGLangSamplerOptions
from relax_gym_plugins.samplers.sglang.sampler import SGLangSampler

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("one_thread")]
NAME = "qwen3_vl"


def make_sampler(folder: Path) -> SGLangSampler:
    path = families.folder(NAME)
    config = RunConfig.model_validate(
        {
            "model": {"name": str(path)},
            "env": [{"id": "test/None-v0"}],
            "algorithm": {"name": "grpo"},
            "train": {"steps": 1, "groups_per_step": 1, "group_size": 2},
        }
    )
    context = RunContext(
        config=config,
        run_dir=folder,
        model_path=path,
        tokenizer=families.renderer(NAME).tokenizer,
        processor=families.processor(NAME),
    )
    return SGLangSampler(
        context, SGLangSamplerOptions(python=sglang_python(), server_args=CPU_ARGUMENTS, env=CPU_ENVIRONMENT)
    )


def clip(seed: int, *times: float, height: int = 28, width: int = 56) -> Video:
    """Noise at some times of a video of 10 frames a second."""
    shape = (len(times), height, width, 3)
    indices = np.rint(np.array(times) * 10).astype(np.int64)
    return Video(
        frames=np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8),
        times=indices / 10,
        indices=indices,
        total_frames=int(indices[-1]) + 5,
        duration=(int(indices[-1]) + 5) / 10,
    )


def test_images_and_videos_of_any_turn(tmp_path: Path) -> None:
    first, second, scaled = image(1, 64, 96), image(2, 32, 64), image(3, 50, 111)
    even, odd = clip(1, 0.0, 0.7, 1.1, 1.2), clip(2, 0.0, 0.4, 75.3, height=56, width=28)
    still = clip(3, 0.0)
    plans: list[Plan] = [
        [[first], []],
        [[], [second]],
        [[first, second], [scaled]],
        [[], []],
        [[even], [odd]],
        [[first, odd, second], [], [still]],
    ]
    before = load_language_model(families.folder(NAME), dtype=torch.float32).eval()
    after = load_language_model(families.folder(NAME), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in after.parameters():
            parameter *= 1.1

    async def main() -> list[list[Played]]:
        sampler = make_sampler(tmp_path)
        try:
            await sampler.start()
            out = []
            for version, model in enumerate((before, after)):
                await sampler.update_weights(model.named_parameters(), version)
                out.append(await episodes(NAME, sampler, plans))
            return out
        finally:
            await sampler.aclose()

    for model, played in zip((before, after), asyncio.run(main()), strict=True):
        check(NAME, played, model)
