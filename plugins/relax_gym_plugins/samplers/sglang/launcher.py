"""Starts SGLang and sees to its end: a script for the interpreter that has SGLang, so it imports nothing of ours.

It forks. The child becomes `python -m sglang.launch_server`; the parent waits until that ends or until whoever started
this script is gone, and then kills all that is left of the process group. If the script itself is killed, the kernel
kills the child, and the child's own children have SGLang's like arrangement with it.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
POLL_SECONDS = 0.1


def main() -> None:
    """argv: the pid of whoever starts this, then the arguments of SGLang. The key comes as a line of standard input,
    since anybody on the machine can read command lines."""
    starter, arguments = int(sys.argv[1]), sys.argv[2:]
    key = sys.stdin.readline().strip()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    guard = os.getpid()
    child = os.fork()
    if not child:
        serve([*arguments, "--api-key", key], guard)
        sys.exit()
    # to SGLang's main process only: it asks its own processes to release what they hold before they end
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    status = watch(child, starter)
    print(f"launcher: {'its starter is gone' if status is None else f'SGLang ended with status {status}'}", flush=True)
    os.killpg(guard, signal.SIGKILL)


def serve(arguments: list[str], guard: int) -> None:
    """What `python -m sglang.launch_server` does. Another exec would show the key."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(1)
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]  # its modules would hide others
    sys.argv = ["sglang.launch_server", *arguments]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def watch(child: int, starter: int) -> int | None:
    """The child's exit status, negative for a signal; None when the starter went first."""
    while os.getppid() == starter:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(POLL_SECONDS)
    return None


if __name__ == "__main__":
    main()
