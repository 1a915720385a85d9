"""16 frames, evenly spread, of a 60 s clip (1280 x 720, 30 frames a second, H.264): seconds and memory by decoder.

Each measurement is a process of its own. "ours" is `read_video` with the decoder it chooses, "ours, NAME" with another;
"NAME alone" asks the library for frames of the same numbers, and "all frames" decodes the whole clip with PyAV, as a
loader without seeking would. A clip of ten minutes shows that memory does not grow with the length.

    python benchmarks/video_decoding.py --write
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from fractions import Fraction
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe

WIDTH, HEIGHT, FPS, TAKEN, PICTURES = 1280, 720, 30, 16, 60
CLIPS = {
    "60 s, key frame every 30": (60, 30),
    "60 s, key frame every 250": (60, 250),
    "600 s, key frame every 250": (600, 250),
}
RESULTS = Path(__file__).parent / "results" / "video_decoding_cpu.json"
PACKAGES = ("av", "decord2", "torchcodec")
ALLOWED_GROWTH_MIB = 16
"""Of the peak, from a clip of one minute to one of ten."""


def make_clip(file: Path, seconds: int, gop: int) -> None:
    """A moving pattern of coarse noise with a square that moves over it."""
    import av

    noise = np.random.default_rng(0).integers(0, 160, (HEIGHT // 8, WIDTH // 8, 3), dtype=np.uint8)
    noise = noise.repeat(8, axis=0).repeat(8, axis=1)
    pictures = []
    for number in range(PICTURES):
        picture = np.roll(noise, number * 7, axis=1)
        picture[200:400, number * 10 : number * 10 + 200] = (220, 60, 60)
        pictures.append(av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format="yuv420p"))
    with av.open(str(file), "w") as container:
        stream: Any = container.add_stream("libx264", rate=Fraction(FPS))
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.options = {"preset": "veryfast", "g": str(gop)}
        for number in range(seconds * FPS):
            frame: Any = pictures[number % PICTURES]
            frame.pts, frame.time_base = number, Fraction(1, FPS)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def ours(decoder: str) -> Callable[[Path], Any]:
    """`read_video`, once the library of the decoder is imported."""
    from relax_gym.media.decoders import DECODERS
    from relax_gym.media.video import VideoPlan, read_video

    plan = VideoPlan(fps=FPS, min_frames=1, max_frames=TAKEN, max_pixels=10**8)
    library(decoder)
    return lambda file: read_video(file, plan, decoders=[decoder] if decoder else tuple(DECODERS))


def library(decoder: str) -> None:
    """Import what a decoder imports."""
    if decoder == "decord":
        import decord  # noqa: F401
    elif decoder == "torchcodec":
        import torchcodec.decoders  # noqa: F401
    else:
        import av  # noqa: F401


def spread(count: int) -> list[int]:
    """The numbers of the frames to take."""
    return [number * count // TAKEN for number in range(TAKEN)]


def av_alone(file: Path) -> None:
    """Seek to each time and decode up to it."""
    import av

    taken = []
    with av.open(str(file)) as container:
        stream = container.streams.video[0]
        for number in spread(stream.frames):
            stamp = round(number / FPS / (stream.time_base or 1))
            container.seek(stamp, stream=stream)
            frame = next(frame for frame in container.decode(stream) if (frame.pts or 0) >= stamp)
            taken.append(frame.to_ndarray(format="rgb24"))
    np.stack(taken)


def all_frames(file: Path) -> None:
    """Decode everything and keep what is wanted."""
    import av

    with av.open(str(file)) as container:
        wanted = set(spread(container.streams.video[0].frames))
        frames = enumerate(container.decode(video=0))
        np.stack([frame.to_ndarray(format="rgb24") for number, frame in frames if number in wanted])


def decord_alone(file: Path) -> None:
    """One batch."""
    from decord import VideoReader

    reader = VideoReader(str(file))
    reader.get_batch(spread(len(reader))).asnumpy()


def torchcodec_alone(file: Path) -> None:
    """One batch."""
    from torchcodec.decoders import VideoDecoder

    decoder = VideoDecoder(str(file), dimension_order="NHWC")
    decoder.get_frames_at(spread(len(decoder))).data.numpy()


WAYS: dict[str, tuple[str, Callable[[Path], Any] | None]] = {
    "ours": ("", None),
    "ours, decord": ("decord", None),
    "ours, torchcodec": ("torchcodec", None),
    "av alone": ("av", av_alone),
    "decord alone": ("decord", decord_alone),
    "torchcodec alone": ("torchcodec", torchcodec_alone),
    "all frames": ("av", all_frames),
}


def memory_mib(field: str) -> float:
    """A field of this process's memory."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
    assert found, "this benchmark needs Linux"
    return int(found[1]) / 1024


def read(way: str, file: Path) -> dict[str, Any]:
    """Take the frames once: seconds and MiB of the import of the library, and of the reading beyond that."""
    decoder, alone = WAYS[way]
    before, start = memory_mib("VmRSS"), time.perf_counter()
    try:
        library(decoder)
        imported = {"import_seconds": time.perf_counter() - start, "import_mib": memory_mib("VmRSS") - before}
        take = alone or ours(decoder)
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # forget the peak of the import
        before, start = memory_mib("VmRSS"), time.perf_counter()
        take(file)
    except Exception as error:  # a library that is not installed or cannot be loaded here
        return {"failed": str(error).splitlines()[0]}
    return {"seconds": time.perf_counter() - start, "mib": memory_mib("VmHWM") - before, **imported}


def measure(clip: Path, way: str, repeats: int) -> dict[str, Any]:
    """Medians over repeats, or why it cannot be used."""
    command = [sys.executable, __file__, "--read", way, str(clip)]
    runs: list[dict[str, Any]] = []
    for _ in range(repeats):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
        if "failed" in runs[0]:
            return runs[0]
    medians: dict[str, Any] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    return {**medians, "all_seconds": [run["seconds"] for run in runs]}


def versions() -> dict[str, str | None]:
    """Of the decoders' distributions."""
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def main() -> None:
    """Measure, print and, when asked, write. The exit code is 1 when memory grows with the length of the clip."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.parent.name}/{RESULTS.name}")
    parser.add_argument("--read", nargs=2, metavar=("WAY", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        print(json.dumps(read(arguments.read[0], Path(arguments.read[1]))))
        return
    rows: list[dict[str, Any]] = []
    print("| clip | way | seconds | peak, MiB | import, s | import, MiB |\n|---|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for name, (seconds, gop) in CLIPS.items():
            clip = Path(folder) / f"{seconds}-{gop}.mp4"
            make_clip(clip, seconds, gop)
            for way in WAYS if seconds == 60 else [way for way in WAYS if way != "all frames"]:
                found = measure(clip, way, arguments.repeats)
                rows.append({"clip": name, "way": way, **found})
                columns = ("seconds", "mib", "import_seconds", "import_mib")
                shown = "cannot be used | | | " if "failed" in found else " | ".join(f"{found[c]:.2f}" for c in columns)
                print(f"| {name} | {way} | {shown} |", flush=True)
    if arguments.write:
        result = {**describe(), **versions(), "repeats": arguments.repeats, "rows": rows}
        RESULTS.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    peaks = [row["mib"] for row in rows if row["way"] == "ours"]
    if peaks[-1] > peaks[-2] + ALLOWED_GROWTH_MIB:
        raise SystemExit(f"the peak grows with the clip: {peaks[-2]:.0f} MiB of one minute, {peaks[-1]:.0f} of ten")


if __name__ == "__main__":
    main()
