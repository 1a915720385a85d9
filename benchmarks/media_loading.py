"""How late the event loop gets while 64 images decode, and what a group of episodes that see the same images holds.

64 JPEGs of one megapixel are loaded as an observation's media are, beside a clock that ticks on the same event loop;
for comparison the same files are decoded on the loop itself. Then a group of 8 samples that share 4 of the images is
pickled as it would travel to a learner in another process.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import pickle
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from machine import describe

from relax_gym.config import MediaConfig
from relax_gym.media import Media
from relax_gym.media.images import read_image
from relax_gym.media.loader import MediaLoader
from relax_gym.types import Placed, StopReason, TrainingSample

IMAGES, SIDE, GROUP, SHARED = 64, 1024, 8, 4
TICK = 0.005
REPEATS = 5
RESULTS = Path(__file__).parent / "results" / "media_loading_cpu.json"


def make_files(folder: Path) -> list[Path]:
    """JPEGs of smooth noise, all different."""
    files = []
    for number in range(IMAGES):
        coarse = np.random.default_rng(number).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        picture = PIL.Image.fromarray(coarse).resize((SIDE, SIDE), PIL.Image.Resampling.BICUBIC)
        files.append(folder / f"{number}.jpg")
        picture.save(files[-1], quality=90)
    return files


async def measure(job: Callable[[], Awaitable[Any]]) -> tuple[float, list[float]]:
    """Seconds of the job, and how late each tick of the loop came meanwhile, in ms."""
    lags: list[float] = []

    async def clock() -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(TICK)
            lags.append((time.perf_counter() - start - TICK) * 1000)

    ticking = asyncio.create_task(clock())
    await asyncio.sleep(0.05)
    lags.clear()
    start = time.perf_counter()
    await job()
    seconds = time.perf_counter() - start
    ticking.cancel()
    return seconds, lags


async def load_all(files: list[Path], loader: MediaLoader) -> list[Media]:
    """All files as 16 observations that arrive together."""
    parts = [{"type": "image", "image": file} for file in files]
    observations = [[{"role": "user", "content": parts[at : at + 4]}] for at in range(0, len(parts), 4)]
    loaded = await asyncio.gather(*(loader.load(observation) for observation in observations))
    return [part["image"] for (message,) in loaded for part in message["content"]]


async def on_the_loop(files: list[Path]) -> None:
    """What must not happen."""
    for file in files:
        read_image(file, max_pixels=2**26, resize_pixels=None)
        await asyncio.sleep(0)


async def measure_lag(files: list[Path]) -> list[dict[str, Any]]:
    """One row for each way to decode: medians over repeats, `lag_max` over all of them."""
    loader = MediaLoader(MediaConfig())
    await load_all(files[:2], loader)  # starts the workers
    ways = {
        "an idle loop": lambda: asyncio.sleep(1.0),
        "MediaLoader": lambda: load_all(files, loader),
        "decoding on the loop": lambda: on_the_loop(files),
    }
    rows = []
    for name, way in ways.items():
        seconds, lags = zip(*[await measure(way) for _ in range(REPEATS)], strict=True)
        rows.append(
            {
                "way": name,
                "seconds": statistics.median(seconds),
                "lag_p50_ms": statistics.median(statistics.median(run) for run in lags),
                "lag_max_ms": max(max(run) for run in lags),
            }
        )
    loader.close()
    return rows


def sample(media: list[Media]) -> TrainingSample:
    """A sample of 400 tokens with these images in it."""
    zeros = np.zeros(400)
    return TrainingSample(
        episode_id="e",
        group_id="g",
        env_id="bench/Look-v0",
        segment=0,
        token_ids=zeros.astype(np.int32),
        loss_mask=zeros.astype(np.int8),
        logprobs=zeros.astype(np.float32),
        versions=zeros.astype(np.int32),
        advantages=zeros.astype(np.float32),
        turn_spans=(),
        turn_rewards=(),
        reward=0.0,
        stop_reason=StopReason.ENV_DONE,
        media=tuple(Placed(media=item, start=at, end=at + 1) for at, item in enumerate(media)),
    )


async def measure_group(files: list[Path]) -> dict[str, float]:
    """MiB per sample of a group that shares its images, in memory and pickled, and what it would be unshared."""
    loader = MediaLoader(MediaConfig())
    found = [(await load_all(files[:SHARED], loader))[:SHARED] for _ in range(GROUP)]
    loader.close()
    samples = [sample(media) for media in found]
    objects = {id(placed.media): placed.media for one in samples for placed in one.media}
    file = io.BytesIO()
    pickle.dump(samples, file, protocol=5)
    alone = sum(item.nbytes for item in found[0])
    return {
        "objects_in_group": len(objects),
        "mib_per_sample_in_memory": sum(item.nbytes for item in objects.values()) / GROUP / 2**20,
        "mib_per_sample_pickled": len(file.getvalue()) / GROUP / 2**20,
        "mib_per_sample_unshared": alone / 2**20,
    }


def main() -> None:
    """Measure, print and, when asked, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.parent.name}/{RESULTS.name}")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = make_files(Path(folder))
        rows, group = asyncio.run(measure_lag(files)), asyncio.run(measure_group(files))
    print(f"| {IMAGES} JPEGs of {SIDE} x {SIDE} | seconds | loop lag p50, max in ms |\n|---|---:|---:|")
    for row in rows:
        print(f"| {row['way']} | {row['seconds']:.2f} | {row['lag_p50_ms']:.1f}, {row['lag_max_ms']:.1f} |")
    print(f"\nA group of {GROUP} samples with {SHARED} images each:")
    for name, value in group.items():
        print(f"  {name} {value:.2f}")
    if arguments.write:
        RESULTS.write_text(json.dumps({**describe(), "rows": rows, "group": group}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
