"""How late the event loop gets while 64 images decode, and what a group of episodes that see the same images holds.

64 JPEGs of one megapixel are loaded as an observation's media are, beside a clock that ticks on the same event loop;
for comparison the same files are decoded on the loop itself. On a machine with other work, much of a lag is waiting for
a core, so what is left without that is counted too. Then a group of 8 samples that share 4 of the images is pickled as
it would travel to a learner in another process.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
from machine import describe
from numpy.typing import NDArray

from relax_gym.config import MediaConfig
from relax_gym.media import Media
from relax_gym.media.images import read_image
from relax_gym.media.loader import MediaLoader
from relax_gym.types import Placed, StopReason, TrainingSample

IMAGES, SIDE, GROUP, SHARED = 64, 1024, 8, 4
TICK = 0.005
REPEATS = 9
RESULTS = Path(__file__).parent / "results" / "media_loading_cpu.json"


class Run(NamedTuple):
    """Seconds of a job, and by how many ms each tick came late: in all, and without waiting for a core."""

    seconds: float
    lag: NDArray[np.float64]
    own: NDArray[np.float64]


def make_files(folder: Path) -> list[Path]:
    """JPEGs of smooth noise, all different."""
    files = []
    for number in range(IMAGES):
        coarse = np.random.default_rng(number).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        picture = PIL.Image.fromarray(coarse).resize((SIDE, SIDE), PIL.Image.Resampling.BICUBIC)
        files.append(folder / f"{number}.jpg")
        picture.save(files[-1], quality=90)
    return files


def waited() -> float:
    """Milliseconds that this thread could have run and had no core; Linux counts them."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e6
    except OSError:
        return 0.0


async def measure(job: Callable[[], Awaitable[Any]]) -> Run:
    """How long the job takes, and how late each tick of the loop comes meanwhile."""
    lags: list[tuple[float, float]] = []

    async def clock() -> None:
        while True:
            before, start = waited(), time.perf_counter()
            await asyncio.sleep(TICK)
            lag = (time.perf_counter() - start - TICK) * 1000
            lags.append((lag, lag - (waited() - before)))

    ticking = asyncio.create_task(clock())
    await asyncio.sleep(0.05)
    lags.clear()
    start = time.perf_counter()
    await job()
    seconds = time.perf_counter() - start
    ticking.cancel()
    return Run(seconds, *np.array(lags).T)


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
    """One row for each way to decode, in turns, so that what else the machine does falls on all alike."""
    loader = MediaLoader(MediaConfig())
    await load_all(files[:2], loader)  # starts the workers
    ways = {
        "an idle loop": lambda: asyncio.sleep(1.0),
        "MediaLoader": lambda: load_all(files, loader),
        "decoding on the loop": lambda: on_the_loop(files),
    }
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, way in ways.items():
            runs[name].append(await measure(way))
    loader.close()
    return [{"way": name, **summary(measured)} for name, measured in runs.items()]


def summary(runs: list[Run]) -> dict[str, Any]:
    """Medians over repeats; and of the largest lags, the least and the most too."""
    out: dict[str, Any] = {"seconds": statistics.median(run.seconds for run in runs)}
    for name in ("lag", "own"):
        lags = [getattr(run, name) for run in runs]
        largest = [float(lag.max()) for lag in lags]
        out |= {f"{name}_p{q}_ms": statistics.median(float(np.percentile(lag, q)) for lag in lags) for q in (50, 99)}
        out |= {f"{name}_max_ms": statistics.median(largest), f"{name}_max_ms_range": [min(largest), max(largest)]}
    return out


def in_words(row: dict[str, Any], name: str) -> str:
    """p50, p99 and max of one row."""
    least, most = row[f"{name}_max_ms_range"]
    medians = [row[f"{name}_{what}_ms"] for what in ("p50", "p99", "max")]
    return f"{', '.join(f'{value:.1f}' for value in medians)} ({least:.1f} to {most:.1f})"


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
    print(f"Loop lag in ms while {IMAGES} JPEGs of {SIDE} x {SIDE} decode: p50, p99, max (of repeats, least to most)")
    print("| way | seconds | lag | without waiting for a core |\n|---|---:|---:|---:|")
    for row in rows:
        print(f"| {row['way']} | {row['seconds']:.2f} | {in_words(row, 'lag')} | {in_words(row, 'own')} |")
    print(f"\nA group of {GROUP} samples with {SHARED} images each:")
    for name, value in group.items():
        print(f"  {name} {value:.2f}")
    if arguments.write:
        out = {**describe(), "load_average": os.getloadavg()[0], "rows": rows, "group": group}
        RESULTS.write_text(json.dumps(out, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
