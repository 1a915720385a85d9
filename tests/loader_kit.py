"""Media in many forms, and a loader that is closed after its use."""

from __future__ import annotations

import asyncio
import http.server
import io
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import PIL.Image
import soundfile

from relax_gym.config import MediaConfig
from relax_gym.media import Media
from relax_gym.media.loader import MediaLoader
from relax_gym.types import Message

T = TypeVar("T")
PIXELS = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
SAMPLES = np.random.default_rng(0).uniform(-0.9, 0.9, 400).astype(np.float32)
RATE = 4000


def png(pixels: Any = PIXELS) -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def wav() -> bytes:
    file = io.BytesIO()
    soundfile.write(file, SAMPLES, RATE, format="WAV", subtype="FLOAT")
    return file.getvalue()


def using(use: Callable[[MediaLoader], Awaitable[T]], config: MediaConfig | None = None, **options: Any) -> T:
    """What `use` makes of a loader, which is closed afterwards."""

    async def main() -> T:
        loader = MediaLoader(config, **options)
        try:
            return await use(loader)
        finally:
            loader.close()

    return asyncio.run(main())


def message(*parts: dict[str, Any]) -> Message:
    return {"role": "user", "content": list(parts)}


def part(kind: str, value: Any, **more: Any) -> dict[str, Any]:
    return {"type": kind, kind: value, **more}


async def items(loader: MediaLoader, *parts: dict[str, Any]) -> list[Media]:
    (loaded,) = await loader.load([message(*parts)])
    return [entry[entry["type"]] for entry in loaded["content"]]


def load(*parts: dict[str, Any], config: MediaConfig | None = None, **options: Any) -> list[Media]:
    return using(lambda loader: items(loader, *parts), config, **options)


def decoded(file: Path) -> int:
    """How often `counting` decoded it."""
    return len(Path(f"{file}.log").read_text().splitlines())


def children() -> set[int]:
    """Running processes of this one, but for the one that counts semaphores."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, rest = stat.read_text().split(" (", 1)
            command = (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue
        state, parent = rest.rsplit(") ", 1)[1].split()[:2]
        if int(parent) == os.getpid() and state != "Z" and b"resource_tracker" not in command:
            found.add(int(pid))
    return found


LOGIN = "Basic bWU6c0BjcmV0"
"""What me:s@cret is as a header."""


class _Server(http.server.BaseHTTPRequestHandler):
    """Serves a picture, or what the path says."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.close_connection = True
        what = self.path.strip("/").partition(".")[0]
        if what == "missing":
            self.send_error(404)
            return
        if what == "locked" and self.headers["Authorization"] != LOGIN:
            self.send_error(401)
            return
        self.send_response(200)
        if what == "short":
            self.send_header("Content-Length", str(len(png()) + 9))
        if what == "chunk":
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with suppress(OSError):  # the other side has had enough
            self._body(what)

    def _body(self, what: str) -> None:
        if what == "endless":
            for _ in range(10_000):
                self.wfile.write(bytes(2**16))
        elif what == "drip":
            for _ in range(300):
                self.wfile.write(b"x")
                self.wfile.flush()
                time.sleep(0.1)
        elif what == "chunk":
            self.wfile.write(b"fff\r\nabc")
        else:
            self.wfile.write(png())

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@contextmanager
def serving() -> Iterator[str]:
    """The address of a server."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
