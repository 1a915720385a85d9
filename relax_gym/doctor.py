"""Explains a run from its folder: whether it lives, what it waits for, what went wrong last, what to do."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from relax_gym.config import read_toml
from relax_gym.errors import RelaxGymError, RunFolderError
from relax_gym.lines import lines_of
from relax_gym.run_folder import RESULTS_FILE, list_checkpoints
from relax_gym.run_log import last_error
from relax_gym.supervision import STATUS_FILE, process_start

State = Literal["healthy", "hangs", "finished", "stopped", "failed", "killed", "unknown", "broken"]
SILENT = 30.0
"""Seconds without a new status after which a run that should write one every second counts as not alive."""
BLOCKED = 5.0
"""Seconds that the event loop may be held up before it is said."""
FULL = 2**20
"""Bytes that are free on a disk where a run could not go on, or could not even say so."""
READ = 2**22
"""Most bytes of a file of lines that are looked at, from its end: what a run wrote last is what may be damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What `relax-gym doctor RUN` says.

    `waits` are the longest first, each with what, who, for (seconds) and limit (seconds or None). `faults` are what is
    wrong with the folder itself. `step` is the last whole step, `saved_step` that of the newest checkpoint.
    """

    run: str
    state: State
    summary: str
    advice: str
    step: int | None = None
    steps: int | None = None
    saved_step: int | None = None
    version: int | None = None
    pid: int | None = None
    host: str | None = None
    status_age: float | None = None
    waits: tuple[Mapping[str, Any], ...] = ()
    queue: Mapping[str, Any] | None = None
    last_error: str | None = None
    faults: tuple[str, ...] = ()


def diagnose(run: Path) -> Diagnosis:
    """Look at the folder of a run, live or not, or of an evaluation; changes nothing.

    Raises:
        RunFolderError: there is no such folder, or it holds no run.
    """
    begun = (run / "config.toml").exists()
    if not begun and not (run / STATUS_FILE).exists():
        raise RunFolderError(f"{str(run)!r} holds no run; give the folder that run_dir names")
    status = _read_status(run)
    age = time.time() - status["written"] if status else math.inf
    live = status.get("state") == "running" and _alive(status, age)
    faults = [] if live else _faults(run)
    steps = status.get("steps")
    try:
        config = read_toml(run / "config.toml") if begun else {}
        if "endpoint" in config:
            return _evaluation(run, config, faults)
        steps = int(config["train"]["steps"]) if begun else steps
    except (RelaxGymError, KeyError, TypeError, ValueError) as error:
        faults.append(f"config.toml: {error}")
    saved = max((step for step, _ in list_checkpoints(run)), default=None)
    finished = saved is not None and saved == steps
    said = _judge_live(status, age) if live else _judge(run, status, age, faults, saved=saved, finished=finished)
    state, summary, advice = said
    step = status.get("step", saved)
    if not live:  # its last status may be older than its last checkpoint
        step = max((known for known in (step, saved) if known is not None), default=None)
    return Diagnosis(
        run=str(run),
        state=state,
        summary=summary,
        advice=advice,
        step=step,
        steps=steps,
        saved_step=saved,
        version=status.get("version"),
        pid=status.get("pid"),
        host=status.get("host"),
        status_age=round(age, 1) if status else None,
        waits=tuple(status.get("waits", ())) if live else (),
        queue=status.get("queue"),
        last_error=status.get("error") or status.get("last_error") or last_error(run / "run.log"),
        faults=tuple(faults),
    )


def render(found: Diagnosis) -> str:
    """For people."""
    lines = [f"{found.run}: {found.state}", f"  {found.summary}"]
    if found.step is not None:
        saved = "no checkpoint yet" if found.saved_step is None else f"newest checkpoint: step {found.saved_step}"
        lines.append(f"  step {found.step} of {found.steps}, {saved}")
    if found.queue:
        numbers = {key: value for key, value in found.queue.items() if value}
        lines.append("  groups: " + (", ".join(f"{key} {value}" for key, value in numbers.items()) or "none"))
    for wait in found.waits[:5]:
        limit = "" if wait["limit"] is None else f" of at most {wait['limit']:g} s"
        lines.append(f"  waits for {wait['what']} ({wait['who']}): {wait['for']:.1f} s{limit}")
    lines += [f"  broken: {fault}" for fault in found.faults]
    if found.last_error:
        lines.append(f"  last error: {found.last_error}")
    return "\n".join([*lines, f"  what to do: {found.advice}"])


def _evaluation(run: Path, config: Mapping[str, Any], faults: list[str]) -> Diagnosis:
    """Of the folder of `relax-gym eval ENV --endpoint URL`."""
    state: State = "broken" if faults else "finished" if (run / RESULTS_FILE).exists() else "unknown"
    again = "the same command with --resume: relax-gym eval {} --endpoint {} --model {} --out {} … --resume".format(
        config["env"]["id"], config["endpoint"]["url"], config["endpoint"]["model"], run
    )
    summary, advice = {
        "broken": ("files of the evaluation's folder are damaged", f"repair or remove what is named, then {again}"),
        "finished": ("the evaluation has its results", f"look at it with: relax-gym view {run}"),
        "unknown": (f"there is no {RESULTS_FILE}: the evaluation goes on, or has been ended", f"if it has: {again}"),
    }[state]
    return Diagnosis(run=str(run), state=state, summary=summary, advice=advice, faults=tuple(faults))


def _judge(
    run: Path, status: Mapping[str, Any], age: float, faults: list[str], *, saved: int | None, finished: bool
) -> tuple[State, str, str]:
    """Of a run whose process has ended."""
    begun = (run / "config.toml").exists()
    again = f"relax-gym train CONFIG --set run_dir={run}"
    resume = f"go on with: {again} --resume" if begun else f"start it again with: {again}"
    if faults:
        return "broken", "files of the folder are damaged", "repair or remove what is named, then resume"
    if finished or status.get("state") == "finished":
        return "finished", "the run has made all its steps", f"look at it with: relax-gym view {run}"
    if not status:
        return "unknown", f"there is no {STATUS_FILE}: the run has not started, or is of an older version", resume
    match status.get("state"):
        case "stopped" if saved is None:
            return "stopped", "a signal ended it before its first step, so that there was nothing to save", resume
        case "stopped":
            return "stopped", "a signal ended it, and it has saved", resume
        case "failed":
            return "failed", "an error ended it", f"remove the cause, then {resume}"
    where = f"process {status['pid']} on {status['host']}"
    if status["host"] != socket.gethostname():
        return (
            "killed",
            f"{where} has written nothing for {age:.0f} s; this is another host",
            f"look there, or {resume}",
        )
    if (free := shutil.disk_usage(run).free) < FULL:
        why = f"{where} is gone; the disk is full ({free} bytes are free), so that it could not say why"
        return "killed", why, f"make room there, then {resume}"
    return "killed", f"{where} is gone and has not said why", resume


def _judge_live(status: Mapping[str, Any], age: float) -> tuple[State, str, str]:
    pid = status["pid"]
    if status["host"] == socket.gethostname() and _is_stopped(pid):
        return "hangs", f"process {pid} is stopped, by SIGSTOP or Ctrl-Z", f"kill -CONT {pid} lets it go on"
    if age > SILENT:
        return "hangs", f"process {pid} exists, but is silent for {age:.0f} s", f"py-spy dump --pid {pid}, or end it"
    if status["loop_blocked"] > BLOCKED:
        what = f"something blocks the event loop for {status['loop_blocked']:.0f} s"
        return "hangs", what, f"py-spy dump --pid {pid} shows what; a second SIGTERM ends the process at once"
    late = [wait for wait in status["waits"] if wait["limit"] and wait["for"] > wait["limit"]]
    if late:
        return (
            "hangs",
            f"{late[0]['what']} ({late[0]['who']}) is past its limit",
            "it is about to be acted on; see run.log",
        )
    return "healthy", f"process {pid} on {status['host']} wrote {age:.0f} s ago", "nothing"


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def _alive(status: Mapping[str, Any], age: float) -> bool:
    if status["host"] != socket.gethostname():
        return age <= SILENT
    pid = int(status["pid"])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's, which is there
        pass
    return bool(process_start(pid) == status.get("pid_started"))


def _read_status(run: Path) -> dict[str, Any]:
    try:
        status = json.loads((run / STATUS_FILE).read_text())
        return status if isinstance(status, dict) and {"pid", "host", "written", "waits"} <= status.keys() else {}
    except (OSError, ValueError):
        return {}


def _faults(run: Path) -> list[str]:
    """What of a folder cannot be read, or does not fit together."""
    faults = []
    for name in ("metrics.jsonl", "episodes.jsonl"):
        try:
            deque(lines_of(run / name, last=READ), 0)
        except (RunFolderError, OSError) as error:
            faults.append(f"{name}: {error}")
    for _, folder in list_checkpoints(run):
        if not any(folder.iterdir()):
            faults.append(f"checkpoints/{folder.name} is empty")
    for name in (STATUS_FILE, "manifest.json", RESULTS_FILE):
        try:
            if (run / name).exists():
                json.loads((run / name).read_text())
        except (OSError, ValueError) as error:
            faults.append(f"{name}: {error}")
    return faults
