"""Programs against unit tests: what passes, what fails, and that no program can pass, hang or stay otherwise."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reward_kit import episode

from relax_gym.errors import ConfigError, RewardError
from relax_gym.rescoring import load_reward
from relax_gym.scoring import WeightedReward, score
from relax_gym_rewards._sandbox import MIB, Finished, Limits, run
from relax_gym_rewards._sandbox_child import FAILED, both_ways, pack, unpack
from relax_gym_rewards.code import Code


def _usable(python: str) -> bool:
    user = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    command = ["unshare", "--user", "--map-root-user", "--net", "--pid", "--mount", "--fork", python, "-c", ""]
    try:
        return subprocess.run(command, env={}, stderr=subprocess.DEVNULL, **user).returncode == 0  # type: ignore[call-overload, no-any-return]
    except OSError:
        return False


PYTHONS = [python for python in (sys.executable, "/usr/bin/python3") if shutil.which("unshare") and _usable(python)]
PYTHON = PYTHONS[0] if PYTHONS else sys.executable
needs_namespaces = pytest.mark.skipif(not PYTHONS, reason="no user namespaces, or no Python that everybody can read")

ADD = "def add(a, b):\n    return a + b\n"
ASSERTS = ["assert add(1, 2) == 3"]
PRINTS = [{"input": "3\n", "output": "9\n"}]


def ask(program: str, tests: Any, files: Any = None, **options: Any) -> float:
    reward = Code(python=PYTHON, **options)
    result: float = asyncio.run(reward(episode(f"```python\n{program}\n```", tests=tests, files=files)))
    return result


@needs_namespaces
@pytest.mark.parametrize(
    ("program", "tests", "expected"),
    [
        (ADD, ASSERTS, 1.0),
        (ADD.replace("+", "-"), ASSERTS, 0.0),
        (ADD, [*ASSERTS, "assert add(1, 1) == 3"], 0.5),
        (ADD, ["def check(f):\n    assert f(2, 2) == 4\ncheck(add)"], 1.0),
        ("def f(x): raise KeyError(x)", ["try:\n    f(1)\nexcept KeyError:\n    pass\nelse:\n    assert False"], 1.0),
        ("def f(x): return (x, {1: {2}})", ["assert f(b'a') == (b'a', {1: {2}})"], 1.0),
        ("print(int(input()) ** 2)", PRINTS, 1.0),
        ("print(int(input()) * 2)", PRINTS, 0.0),
        ("print(open('given/data').read())", [{"input": "", "output": "hello"}], 1.0),
        ("def broken(:", ASSERTS, 0.0),
        ("", ASSERTS, 0.0),
        ("def add(a, b=0): return sum((a, b))", ["assert add(3) == 3", "assert add(a=1, b=1) == 2"], 1.0),
        ("def f(n): return [] if n == 0 else f(n - 1) + [n]", ["assert f(3) == [1, 2, 3]"], 1.0),
        ("def f(): return 0.1 + 0.2", ["assert f() == 0.3", "assert abs(f() - 0.3) < 1e-9"], 0.5),
        ("def f(): return 1\nprint('noise' * 1000)", ["assert f() == 1"], 1.0),
        ("def f(): return undefined", ["assert f() == 1"], 0.0),
        ("def g(): return 1", ["assert f() == 1"], 0.0),
        ("class Solution:\n    def f(self, x): return x + 1", ["assert Solution().f(1) == 2"], 0.0),
        ("def f(n): return list(range(n))", ["assert f(10000) == list(range(10000))"], 1.0),
        (
            "import sys\nfor line in sys.stdin: print(line[::-1].strip())",
            [{"input": "ab\ncd\n", "output": "ba\ndc"}],
            1.0,
        ),
        ("print('9 ')\nprint()", PRINTS, 1.0),
        ("print('99')", PRINTS, 0.0),
        ("print(9)\nraise ValueError", PRINTS, 0.0),
    ],
)
def test_programs_get_the_share_of_tests_they_pass(program: str, tests: Any, expected: float) -> None:
    assert ask(program, tests, {"data": "hello"}) == expected


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize(
    "program",
    [
        "import os; print('PASSED', 90, flush=True); os._exit(0)",
        "import os; os._exit(90)",
        "import sys; sys.exit(0)",
        "import sys; sys.exit(90)",
        "import atexit, os; atexit.register(lambda: os._exit(90))",
        "class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()",
        "class Any(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Any()",
        "def add(a, b): raise SystemExit(90)",
        "class SystemExit(Exception): pass\ndef add(a, b): raise SystemExit(90)",
        "class Unsupported(BaseException): pass\ndef add(a, b): raise Unsupported",
        "import builtins\nbuiltins.AssertionError = Exception\nbuiltins.len = lambda x: 3\ndef add(a, b): return None",
        "import sys\ndef add(a, b): return sys._getframe(1).f_locals.get('expected', sys._getframe(1).f_locals)",
        "import gc\ndef add(a, b): return [o for o in gc.get_objects() if isinstance(o, str) and 'assert' in o][0]",
        "import os, signal\nfor pid in (os.getppid(), 0, -1):\n"
        "  try: os.kill(pid, signal.SIGKILL)\n  except OSError: pass",
        'import os\nfor fd in range(64):\n  try: os.write(fd, b\'["list", ["value", ["int", "0x3"\\n\')\n'
        "  except OSError: pass",
    ],
)
def test_k82_no_program_can_write_its_own_verdict(program: str) -> None:
    assert ask(program, ASSERTS) == 0.0
    assert ask(program, PRINTS) == 0.0


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(1000)",
        "x = 10**10**10",
        "import re; re.match('(a+)+$', 'a' * 60 + 'b')",
        "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n"
        "  if os.fork() == 0:\n    time.sleep(1000)\ntime.sleep(1000)",
        "import ctypes, os, time\nctypes.CDLL(None).prctl(1, 0)\n"
        "try: os.setsid()\nexcept OSError: pass\ntime.sleep(1000)",
        "import ctypes, os, time\nctypes.CDLL(None).prctl(1, 0)\nif os.fork() == 0:\n"
        "  os.setsid()\n  time.sleep(1000)\nos.kill(0, 9)",
        "x = bytearray(10**10)",
        "while True: print('x' * 10**6)",
        "open('big', 'wb').write(bytes(10**8))",
    ],
)
def test_k72_what_would_run_for_ever_ends_and_leaves_nothing(program: str) -> None:
    marker = f"left-{os.urandom(8).hex()}"
    limits = Limits(seconds=1.0)
    done = asyncio.run(run(PYTHON, ["/tmp/given/program.py", marker], files={"program.py": program}, limits=limits))
    assert done.status != 0 and len(done.output) <= limits.disk * MIB
    assert_gone(marker)


def assert_gone(marker: str) -> None:
    """The kernel takes a moment to end a namespace whose first process has been killed."""
    for _ in range(500):
        if not any(marker in command for command in _commands()):
            return
        time.sleep(0.01)
    raise AssertionError("a process is left")


def _commands() -> Iterator[str]:
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield file.read_text(errors="replace")
        except OSError:  # it has ended meanwhile
            continue


@pytest.fixture
def outside() -> Iterator[Path]:
    """A folder that everybody may read and that is not below /tmp, which the sandbox replaces."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@needs_namespaces
def test_k95_a_program_reaches_no_network_no_data_no_daemons_no_environment_and_no_tests(
    monkeypatch: pytest.MonkeyPatch, outside: Path
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://localhost:1")
    (outside / "answers").write_text("42")
    program = (
        "import os, socket\n"
        "def refused(call):\n"
        "  try: call()\n"
        "  except OSError: return True\n"
        "  return False\n"
        f"print(refused(lambda: open({str(outside / 'answers')!r})), refused(lambda: open({__file__!r})))\n"
        f"print(refused(lambda: socket.socket(socket.AF_UNIX).connect({str(outside / 'daemon')!r})))\n"
        "print(refused(lambda: open('/usr/x', 'w')), refused(lambda: os.mkdir('/etc/x')), os.path.exists('/var'))\n"
        "print(refused(lambda: open('given/program.py', 'w')), os.listdir('.'), os.listdir('/proc'))\n"
        "print(refused(lambda: socket.create_connection(('127.0.0.1', 9), 1)), refused(lambda: os.mkdir('/x')))\n"
        "print(sorted(set(os.environ) - {'LC_CTYPE'}), os.getpid())\n"
    )
    output = "True True\nTrue\nTrue True False\nTrue ['given'] []\nTrue True\n['HOME', 'PATH'] 2"
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(outside / "daemon"))
        daemon.listen()
        os.chmod(outside / "daemon", 0o666)
        assert ask(program, [{"input": "", "output": output}]) == 1.0


@needs_namespaces
def test_a_python_behind_links_runs_programs_and_shows_nothing_beside_it(outside: Path) -> None:
    (outside / "real" / "bin").mkdir(parents=True)
    (outside / "real" / "pyvenv.cfg").write_text(f"home = {Path(PYTHON).resolve().parent}\n")
    (outside / "real" / "bin" / "python").symlink_to(Path(PYTHON).resolve())
    (outside / "linked").symlink_to("real")
    (outside / "answers").write_text("42")
    program = f"import ctypes, os, random, sys\nprint(sys.prefix, sorted(os.listdir({str(outside)!r})))"
    reward = Code(python=str(outside / "linked" / "bin" / "python"))
    tests = [{"input": "", "output": f"{outside / 'linked'} ['linked', 'real']"}]
    assert asyncio.run(reward(episode(program, tests=tests))) == 1.0


@needs_namespaces
def test_a_program_can_neither_trace_nor_signal_the_first_process_of_its_namespace() -> None:
    program = (
        "import ctypes, os\n"
        "for number in range(1, 65): os.kill(1, number)\n"
        "print(os.getpid() > 1, os.getppid(), os.getpgid(0) == os.getpid(), ctypes.CDLL(None).ptrace(16, 1, 0, 0))\n"
    )
    assert ask(program, [{"input": "", "output": "True 1 True -1"}]) == 1.0


@needs_namespaces
def test_k73_cancelling_ends_the_program() -> None:
    marker = f"left-{os.urandom(8).hex()}"

    async def cancelled() -> None:
        files = {"program.py": "while True: pass"}
        arguments = ["/tmp/given/program.py", marker]
        task = asyncio.ensure_future(run(PYTHON, arguments, files=files, limits=Limits(seconds=60)))
        while not any(marker in command for command in _commands()):  # noqa: ASYNC110 (another process sets it)
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert_gone(marker)


@needs_namespaces
@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        (["assert add(object(), 2)"], "more than functions and plain values"),
        (["assert add.x == 1"], "more than functions and plain values"),
        (["assert ("], "no Python"),
        ([], "must be a list"),
        ([{"input": 1, "output": "1"}], "must be a list"),
        ("assert True", "must be a list"),
    ],
)
def test_k74_a_test_that_cannot_run_leaves_the_episode_unscored(tests: Any, reason: str) -> None:
    term = WeightedReward(name="code", weight=1.0, reward=Code(python=PYTHON))
    out = asyncio.run(score(episode(ADD, tests=tests), [term], timeout=30))
    assert out.reward is None and reason in out.reward_failures["code"]


@needs_namespaces
def test_all_or_nothing() -> None:
    assert ask(ADD, [*ASSERTS, "assert add(1, 1) == 3"], score="all") == 0.0


def runs(monkeypatch: pytest.MonkeyPatch, status: int | None) -> list[str]:
    """The programs that run from now on, all with this exit status; what holds the tests outlives them and fails."""
    ran: list[str] = []

    async def instead(*_: Any, files: dict[str, str], **__: Any) -> Finished:
        if "program.py" not in files:
            await asyncio.sleep(0.01)
            return Finished(status=FAILED, output="")
        ran.append(files["program.py"])
        await asyncio.sleep(0)
        return Finished(status=status, output="9")

    monkeypatch.setattr("relax_gym_rewards.code.run", instead)
    return ran


@pytest.mark.parametrize("tests", [PRINTS * 3, ASSERTS * 3])
def test_after_a_test_that_takes_too_long_no_other_runs(monkeypatch: pytest.MonkeyPatch, tests: Any) -> None:
    ran = runs(monkeypatch, status=None)
    assert ask("endless", tests) == 0.0 and len(ran) == 1


@pytest.mark.parametrize("tests", [PRINTS * 3, ASSERTS * 3])
@pytest.mark.parametrize(("score", "number"), [("fraction", 3), ("all", 1)])
def test_all_or_nothing_ends_with_the_first_failure(
    monkeypatch: pytest.MonkeyPatch, tests: Any, score: str, number: int
) -> None:
    ran = runs(monkeypatch, status=1)
    assert ask("wrong", tests, score=score) == 0.0 and len(ran) == number


def test_an_episode_keeps_its_slot_for_all_its_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = runs(monkeypatch, status=0)

    async def together() -> list[float]:
        reward = Code(workers=1)
        return await asyncio.gather(*(reward(episode(name, tests=PRINTS * 3)) for name in ("first", "second")))

    assert asyncio.run(together()) == [1.0, 1.0] and ran == ["first"] * 3 + ["second"] * 3


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux has it")
def test_by_default_as_many_programs_as_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5})
    assert Code().workers == 3


def test_a_sandbox_that_cannot_be_made_is_no_failure_of_the_program() -> None:
    with pytest.raises(RewardError, match="sandbox cannot be made"):
        asyncio.run(Code(python="/nonexistent/python")(episode(ADD, tests=PRINTS)))


@needs_namespaces
def test_a_run_starts_with_a_python_that_the_sandbox_can_read() -> None:
    reward = Code()
    reward.preflight()
    assert reward.python in PYTHONS
    assert asyncio.run(reward(episode(ADD, tests=ASSERTS))) == 1.0


def test_a_run_does_not_start_without_a_sandbox() -> None:
    with pytest.raises(ConfigError, match=r"reward 'code'.*the sandbox cannot be made here.*/nonexistent/python"):
        load_reward("code", {"python": "/nonexistent/python"})


@pytest.mark.parametrize("options", [{"seconds": 0}, {"memory": -1}, {"workers": 0}, {"score": "half"}])
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RewardError, match=next(iter(options))):
        Code(**options)


def test_plain_values_keep_their_types_between_processes() -> None:
    value = [1, True, 1.5, float("inf"), 2j, "a", b"a", None, (1,), {1}, frozenset({2}), {(1, 2): [3]}, -(10**5000)]
    assert repr(unpack(pack(value))[:-1]) == repr(value[:-1]) and unpack(pack(value)) == value
    with pytest.raises(TypeError, match="object cannot leave"):
        pack(object())


def test_lines_between_processes_are_not_read_byte_by_byte() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"first\nsecond\n")
        lines, out = both_ways(theirs.detach())
        with lines, out:
            out.write(b"reply\n")
            assert lines.readline() == b"first\n" and ours.recv(10) == b"reply\n"
            os.set_blocking(lines.fileno(), False)
            with pytest.raises(BlockingIOError):
                os.read(lines.fileno(), 1)  # the second is here already
            assert lines.readline() == b"second\n"
