"""The processes that decode: what hangs, dies, is cancelled or does not come, and what is left of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from loader_kit import PIXELS, children, decoded, items, load, part, png, serving, using
from slow_decoders import counting, misbehaving

from relax_gym.config import MediaConfig
from relax_gym.errors import MediaError
from relax_gym.media import Media
from relax_gym.media.loader import MediaLoader

PATIENT = MediaConfig(timeout=600, workers=1)


def test_k65_a_decoder_that_hangs_dies_or_fails_takes_only_its_own_item_with_it() -> None:
    before = children()
    data = [png(), b"hang", png(PIXELS // 2), b"crash", b"fail", png(PIXELS // 3)]

    async def use(loader: MediaLoader) -> list[Any]:
        jobs = [items(loader, part("image", one)) for one in data]
        return await asyncio.gather(*jobs, return_exceptions=True)

    loaded = using(use, MediaConfig(timeout=4, workers=1), decode=misbehaving)
    assert [len(loaded[at]) for at in (0, 2, 5)] == [1, 1, 1]
    assert [str(loaded[at]) for at in (1, 3, 4) if isinstance(loaded[at], MediaError)] == [
        "image bytes (4): took longer than media.timeout = 4 s to read",
        "image bytes (5): made its decoder crash (exit code 11)",
        "image bytes (4): cannot be read: RuntimeError: codec fell over",
    ]
    assert children() == before


def test_k67_decoding_happens_in_other_processes(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.png" for number in range(4)]
    for number, file in enumerate(files):
        file.write_bytes(png(PIXELS // (number + 1)))
    load(*(part("image", file) for file in files), decode=counting)
    pids = {int(line) for file in files for line in Path(f"{file}.log").read_text().splitlines()}
    assert pids
    assert os.getpid() not in pids


class Frame:
    """A frame that notes which thread takes it."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        self.threads.append(threading.get_ident())
        return PIXELS


def test_k67_arrays_are_converted_in_other_threads() -> None:
    frame = Frame()
    load(part("image", frame))
    assert frame.threads
    assert threading.get_ident() not in frame.threads


async def begin(loader: MediaLoader, data: bytes) -> asyncio.Task[list[Media]]:
    """A load that a worker has begun."""
    await items(loader, part("image", png()))  # starts the worker
    loading = asyncio.create_task(items(loader, part("image", data)))
    await asyncio.sleep(0.5)
    return loading


def test_a_job_that_nobody_waits_for_any_more_ends() -> None:
    async def use(loader: MediaLoader) -> list[Media]:
        loading = await begin(loader, b"hang")
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        return await asyncio.wait_for(items(loader, part("image", png(PIXELS // 2))), 60)

    assert len(using(use, PATIENT, decode=misbehaving)) == 1


def test_one_who_is_cancelled_does_not_take_the_job_from_another(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(png())

    async def use(loader: MediaLoader) -> list[Media]:
        first, second = (asyncio.create_task(items(loader, part("image", file))) for _ in range(2))
        await asyncio.sleep(0.1)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert first.cancelled()
        return await second

    assert len(using(use, decode=counting)) == 1
    assert decoded(file) == 1


def test_close_ends_what_hangs_and_tells_who_waits() -> None:
    before = children()

    async def use(loader: MediaLoader) -> None:
        loading = await begin(loader, b"hang")
        loader.close()
        assert children() == before
        with pytest.raises(MediaError, match="the processes that decode have ended"):
            await asyncio.wait_for(loading, 60)

    using(use, PATIENT, decode=misbehaving)


def test_an_idle_worker_that_is_killed_is_replaced() -> None:
    before = children()

    async def use(loader: MediaLoader) -> Any:
        await items(loader, part("image", png()))
        (worker,) = children() - before
        os.kill(worker, signal.SIGKILL)
        jobs = [part("image", png(PIXELS // shade)) for shade in (2, 3)]
        return [(await asyncio.gather(items(loader, job), return_exceptions=True))[0] for job in jobs]

    unlucky, later = using(use, PATIENT)
    assert isinstance(unlucky, (list, MediaError))
    assert len(later) == 1


def test_workers_that_cannot_start_are_an_error_that_says_what_to_do() -> None:
    script = (
        "import asyncio; from relax_gym.media.loader import MediaLoader\n"
        "asyncio.run(MediaLoader().load([{'role': 'user', 'content': [{'type': 'image', 'image': b'x'}]}]))"
    )
    done = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "MediaError: image bytes (1): the processes that decode have ended; where they cannot" in done.stderr


def test_downloads_end_at_their_limits() -> None:
    expected = {
        "/drip.png": "took longer than media.timeout = 3 s to read",
        "/missing.png?key=secret": "cannot be downloaded: Not Found",
        "/endless.png": "is larger than media.max_bytes = 1000000",
        "/short.png?key=secret": "breaks off: 9 bytes of it did not come",
        "/chunk.png?key=secret": "cannot be downloaded: IncompleteRead(0 bytes read)",
    }

    async def use(loader: MediaLoader) -> list[Any]:
        jobs = [items(loader, part("image", address + path)) for path in expected]
        return await asyncio.gather(*jobs, return_exceptions=True)

    with serving() as address:
        failed = using(use, MediaConfig(timeout=3, max_bytes=1_000_000))
    assert [type(error) for error in failed] == [MediaError] * len(expected)
    assert [str(error) for error in failed] == [
        f"image {address}{path.partition('?')[0]}: {why}" for path, why in expected.items()
    ]


def test_an_address_that_nobody_listens_at() -> None:
    with pytest.raises(MediaError, match=r"^image http://127.0.0.1:9/a%20b.png: cannot be downloaded: ") as raised:
        load(part("image", "http://me:secret@127.0.0.1:9/a%20b.png?key=secret"))
    assert "secret" not in str(raised.value)


def test_a_password_in_an_address_is_sent_and_never_shown() -> None:
    with serving() as address:
        host = address.removeprefix("http://")
        (loaded,) = load(part("image", f"http://me:s%40cret@{host}/locked.png"))
        assert loaded == load(part("image", png()))[0]
        with pytest.raises(MediaError) as raised:
            load(part("image", f"http://me:hunter2@{host}/locked.png"))
    assert str(raised.value) == f"image {address}/locked.png: cannot be downloaded: Unauthorized"
