"""Programs of a policy, in Linux namespaces of their own: no network, no other process, no data."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_gym.errors import RewardError

CHILD = Path(__file__).with_name("_sandbox_child.py").read_text(encoding="utf-8")
NOBODY = 65534
MIB = 2**20
UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--pid", "--ipc", "--mount", "--fork", "--kill-child")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one program: wall and CPU time in seconds, address space and files in MiB, processes and open files."""

    seconds: float = 5.0
    memory: int = 512
    disk: int = 16
    processes: int = 16
    files: int = 64

    def rlimits(self) -> dict[str, int]:
        """By their names in the module `resource`."""
        return {
            "RLIMIT_CPU": int(self.seconds) + 1,
            "RLIMIT_AS": self.memory * MIB,
            "RLIMIT_FSIZE": self.disk * MIB,
            "RLIMIT_NPROC": self.processes + 1,  # the namespace has a first process beside them
            "RLIMIT_NOFILE": self.files,
            "RLIMIT_CORE": 0,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a program ended: its exit status (negative: the signal), None when time ran out, and what it printed."""

    status: int | None
    output: str


def script(mode: str, fd: int) -> str:
    """The source that plays a part inside."""
    return f"{CHILD}\nmain({mode!r}, {fd})\n"


async def run(
    python: str,
    arguments: Sequence[str],
    *,
    files: Mapping[str, str],
    limits: Limits,
    stdin: str = "",
    channel: int | None = None,
) -> Finished:
    """Run `python arguments…` in an empty folder with `files` below `given/`. Cancelling it kills the program.

    Raises RewardError when the sandbox itself cannot be made.
    """
    with ExitStack() as stack:
        spec, given, output = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        ready_out, ready_in = os.pipe()
        stack.callback(os.close, ready_out)
        size = MIB + 2 * sum(4 * len(text) for text in files.values())
        content: dict[str, Any] = {"files": dict(files), "given": size, "disk": limits.disk * MIB, "ready": ready_in}
        content |= {"limits": limits.rlimits(), "arguments": list(arguments)}
        for file, text in ((spec, json.dumps(content)), (given, stdin)):
            file.write(text.encode("utf-8", "replace"))
            file.seek(0)
        killer = ("timeout", "--foreground", "-s", "KILL", f"{limits.seconds + 5:g}")
        try:
            process = await asyncio.create_subprocess_exec(
                *killer, *UNSHARE, "--", python, "-I", "-c", script("enter", spec.fileno()),
                stdin=given, stdout=output, stderr=asyncio.subprocess.DEVNULL, env={"PATH": "/usr/bin:/bin"},
                pass_fds=[spec.fileno(), ready_in, *([] if channel is None else [channel])],
                start_new_session=True, cwd="/", **_unprivileged(),
            )  # fmt: skip
        finally:
            os.close(ready_in)
        status = await _wait(process, limits.seconds)
        os.set_blocking(ready_out, False)
        if not _is_ready(ready_out):
            raise RewardError("the sandbox cannot be made here: " + _advice(python))
        output.seek(0)
        return Finished(status=status, output=output.read(limits.disk * MIB).decode("utf-8", "replace"))


async def _wait(process: asyncio.subprocess.Process, seconds: float) -> int | None:
    try:
        return await asyncio.wait_for(process.wait(), seconds)
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)  # with its first process the kernel ends the whole namespace
            await process.wait()


def _is_ready(fd: int) -> bool:
    try:
        return bool(os.read(fd, 1))
    except BlockingIOError:
        return False


def _unprivileged() -> dict[str, Any]:
    """As root, run as nobody: the kernel counts no processes of root."""
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}


def _advice(python: str) -> str:
    missing = [name for name in ("unshare", "timeout") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} not found; install util-linux and coreutils"
    return (
        f"it takes Linux 5.12 with user namespaces and pivot_root, and {python} must be readable "
        "by everybody when relax-gym runs as root (name another with python = …)"
    )
