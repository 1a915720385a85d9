"""Explains a run from its folder: whether it lives, what it waits for, what went wrong last, what to do."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from relax_gym.config import read_toml
from relax_gym.errors import RelaxGymError, RunFolderError
from relax_gym.run_folder import RESULTS_FILE, lines_of, list_checkpoints
from relax_gym.supervision import STATUS_FILE, process_start

State = Literal["healthy", "hangs", "finished", "stopped", "failed", "killed", "unknown", "broken"]
SILENT = 30.0
"""Seconds without a new status after which a run that should write one every second counts as not alive."""
BLOCKED = 5.0
"""Seconds that the event loop may be held up before it is said."""
_ERROR_LINE = re.compile(r"^\S+ \S+ (ERROR|CRITICAL|WARNING) (.*)$", re.M)


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
    if not (run / "config.toml").exists() and not (run / STATUS_FILE).exists():
        raise RunFolderError(f"{str(run)!r} holds no run; give the folder that run_dir names")
    status, steps, faults = _read_status(run), None, _faults(run)
    try:
        config = read_toml(run / "config.toml")
        if "endpoint" in config:
            return _evaluation(run, config, faults)
        steps = int(config["train"]["steps"])
    except (RelaxGymError, KeyError, TypeError, ValueError) as error:
        faults.append(f"config.toml: {error}")
    checkpoints = list_checkpoints(run)
    saved = checkpoints[-1][0] if checkpoints else None
    age = time.time() - status["written"] if status else None
    state, summary, advice = _judge(run, status, age, faults, finished=saved is not None and saved == steps)
    return Diagnosis(
        run=str(run),
        state=state,
        summary=summary,
        advice=advice,
        step=status.get("step", saved),
        steps=steps,
        saved_step=saved,
        version=status.get("version"),
        pid=status.get("pid"),
        host=status.get("host"),
        status_age=None if age is None else round(age, 1),
        waits=tuple(status.get("waits", ())),
        queue=status.get("queue"),
        last_error=status.get("error") or status.get("last_error") or _last_error(run / "run.log"),
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
    run: Path, status: Mapping[str, Any], age: float | None, faults: list[str], *, finished: bool
) -> tuple[State, str, str]:
    resume = f"go on with: relax-gym train CONFIG --set run_dir={run} --resume"
    if age is not None and status.get("state") == "running" and _alive(status, age):
        return _judge_live(status, age)
    if faults:
        return "broken", "files of the folder are damaged", "repair or remove what is named, then resume"
    if finished or status.get("state") == "finished":
        return "finished", "the run has made all its steps", f"look at it with: relax-gym view {run}"
    if not status:
        return "unknown", f"there is no {STATUS_FILE}: the run has not started, or is of an older version", resume
    match status.get("state"):
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
    return "killed", f"{where} is gone and has not said why", resume


def _judge_live(status: Mapping[str, Any], age: float) -> tuple[State, str, str]:
    pid = status["pid"]
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
            deque(lines_of(run / name), 0)
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


def _last_error(log: Path) -> str | None:
    """The last line of the log that reports a fault."""
    try:
        found = _ERROR_LINE.findall(log.read_text(errors="replace"))
    except OSError:
        return None
    return str(found[-1][1]) if found else None
