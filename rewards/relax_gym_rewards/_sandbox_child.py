"""Runs inside the sandbox, where nothing else of relax-gym can be read: its source is given to `python -c`."""

from __future__ import annotations

import ast
import builtins
import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any, BinaryIO

READY, PASSED, FAILED, UNSUPPORTED = b"r", 90, 91, 92
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
DEVICES = ("/dev/full", "/dev/null", "/dev/random", "/dev/urandom", "/dev/zero")
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, READ_ONLY_NOSUID = 442, -100, 0x8000, 3
BIND_RECURSIVE, DETACH = 0x5000, 2
NOSUID_NODEV, DUMPABLE, DROP_BOUNDING, NO_NEW_PRIVILEGES = 6, 4, 24, 38


def enter(spec_fd: int) -> None:
    """Close off the files, take all privileges away, and run the program of the spec (a JSON object)."""
    with open(spec_fd, encoding="utf-8") as file:
        spec = json.load(file)
    libc = ctypes.CDLL(None, use_errno=True)
    new_root(libc)
    empty(libc, "/dev/shm", 4096)
    empty(libc, "/tmp", spec["disk"])
    os.chdir("/tmp")
    os.mkdir("given")
    empty(libc, "/tmp/given", spec["given"])
    for name, text in spec["files"].items():
        with open(f"given/{name}", "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
    read_only(libc, "/tmp/given", 0)
    must(libc.prctl(DUMPABLE, 0, 0, 0, 0))  # so that nothing can trace the first process; the program gets it back
    if child := os.fork():
        os._exit(first(child))
    os.setsid()
    for name, value in spec["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    for capability in range(64):
        libc.prctl(DROP_BOUNDING, capability, 0, 0, 0)
    must(libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    os.write(spec["ready"], READY)
    os.close(spec["ready"])
    os.execve(
        sys.executable, [sys.executable, "-I", "-B", *spec["arguments"]], {"PATH": "/usr/bin:/bin", "HOME": "/tmp"}
    )


def new_root(libc: Any) -> None:
    """Leave no file to be reached but those of `shown`, all read-only, and empty folders."""
    os.umask(0o022)
    empty(libc, "/tmp", 2**20)
    for path in sorted(shown()):
        there = f"/tmp{path}"
        if os.path.lexists(there):
            continue
        os.makedirs(os.path.dirname(there), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), there)
            continue
        if os.path.isdir(path):
            os.mkdir(there)
        else:
            open(there, "x").close()
        must(libc.mount(path.encode(), there.encode(), None, BIND_RECURSIVE, None))
    for name in ("dev/shm", "proc", "tmp"):
        os.makedirs(f"/tmp/{name}", exist_ok=True)
    read_only(libc, "/tmp", AT_RECURSIVE)
    os.chdir("/tmp")
    must(libc.pivot_root(b".", b"."))
    must(libc.umount2(b".", DETACH))
    os.chdir("/")


def shown() -> set[str]:
    """Files and folders that Python needs, and the links that lead to them."""
    found = set()
    pending = [*SYSTEM, *SETTINGS, *DEVICES, sys.executable]
    pending += [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix]
    while pending:
        path = pending.pop()
        if not os.path.exists(path):
            continue
        names = path.split("/")
        for end in range(2, len(names) + 1):
            part = "/".join(names[:end])
            if os.path.islink(part):
                path = part
                pending.append(os.path.normpath(os.path.join(os.path.dirname(part), os.readlink(part), *names[end:])))
                break
        found.add(path)
    return found


def must(result: int) -> None:
    """Raise what a call into libc has left as its error."""
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def empty(libc: Any, path: str, size: int) -> None:
    """Put an empty folder over this one, for so many bytes."""
    must(libc.mount(b"tmpfs", path.encode(), b"tmpfs", NOSUID_NODEV, b"size=%d" % size))


def read_only(libc: Any, path: str, flags: int) -> None:
    """Take writing away, with AT_RECURSIVE in everything mounted below as well."""
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY_NOSUID, 0, 0, 0)
    must(libc.syscall(MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, ctypes.byref(attributes), 32))


def first(child: int) -> int:
    """Wait for the program and tell how it ended, as the process with which the kernel ends all others in here.

    It is none that the program could keep alive: the program cannot signal it, nor leave its namespace.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def pack(value: Any) -> Any:
    """Plain values as JSON that keeps their types. Raises TypeError for anything else, subclasses included."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind in (int, float, complex, bytes):
        return [kind.__name__, value.hex() if kind in (bytes, float) else hex(value) if kind is int else repr(value)]
    if kind in (list, tuple, set, frozenset):
        return [kind.__name__, [pack(item) for item in value]]
    if kind is dict:
        return ["dict", [[pack(key), pack(item)] for key, item in value.items()]]
    raise TypeError(f"{kind.__name__} cannot leave its process")


def unpack(data: Any) -> Any:
    """The inverse of `pack`; builds nothing but plain values."""
    if data is None or type(data) in (bool, str):
        return data
    kind, value = data
    if kind == "dict":
        return {unpack(key): unpack(item) for key, item in value}
    if kind in ("list", "tuple", "set", "frozenset"):
        return getattr(builtins, kind)(unpack(item) for item in value)
    makers = {"int": lambda t: int(t, 16), "float": float.fromhex, "bytes": bytes.fromhex, "complex": complex}
    return makers[kind](value)


def both_ways(fd: int) -> tuple[BinaryIO, BinaryIO]:
    """The channel to read lines from, and to write to at once. A socket has no buffer for both."""
    return open(fd, "rb"), open(fd, "wb", buffering=0, closefd=False)


def serve(fd: int) -> None:
    """Run the program, then call its functions for the process that holds the tests."""
    names: dict[str, Any] = {"__name__": "program"}
    with open("/tmp/given/program.py", encoding="utf-8") as file:
        source = file.read()
    exec(compile(source, "program.py", "exec"), names)
    requests, replies = both_ways(fd)
    with requests, replies:
        for line in requests:
            name, arguments, keywords = unpack(json.loads(line))
            try:
                reply = ["value", names[name](*arguments, **keywords)]
                out = json.dumps(pack(reply))
            except Exception as error:
                out = json.dumps(pack(["error", [type(error).__name__, str(error)[:1000]]]))
            replies.write(out.encode() + b"\n")


class Unsupported(BaseException):
    """The test asks for something that cannot pass between the processes; no fault of the program."""


class Gone(BaseException):
    """The program has ended, or answers with what is no answer. A test that expects an Exception must not take it."""


class Remote:
    """A function of the program, seen from the tests. What it returns is plain, so that nothing of it runs here."""

    def __init__(self, name: str, replies: Any, requests: Any) -> None:
        self.__name__, self.__replies, self.__requests = name, replies, requests

    def __getattr__(self, name: str) -> Any:
        raise Unsupported

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        try:
            request = json.dumps(pack([self.__name__, list(arguments), keywords]))
        except TypeError:
            raise Unsupported from None
        try:
            self.__requests.write(request.encode() + b"\n")
        except OSError:
            raise Gone from None
        try:
            kind, value = unpack(json.loads(self.__replies.readline()))
            if kind != "value":
                error, text = map(str, value)
        except Exception:
            raise Gone from None
        if kind == "value":
            return value
        known = getattr(builtins, error, None)
        if not (isinstance(known, type) and issubclass(known, Exception)):
            known = RuntimeError
        try:
            raised = known(text)
        except TypeError:
            raised = RuntimeError(text)
        raise raised


def judge(fd: int) -> int:
    """Run the test, where names without a definition are functions of the program. The exit status is the verdict."""
    with open("/tmp/given/test.py", encoding="utf-8") as file:
        tree = ast.parse(file.read())
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    replies, requests = both_ways(fd)
    with replies, requests:
        names: dict[str, Any] = {"__name__": "test"}
        names |= {name: Remote(name, replies, requests) for name in used if not hasattr(builtins, name)}
        try:
            exec(compile(tree, "test.py", "exec"), names)
        except Unsupported:
            return UNSUPPORTED
        except (Exception, Gone):
            return FAILED
    return PASSED


def main(mode: str, fd: int) -> None:
    """What `-c` ends with."""
    if mode == "enter":
        enter(fd)
    elif mode == "serve":
        serve(fd)
    else:
        os._exit(judge(fd))
