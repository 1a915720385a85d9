"""The timeline of a run: what it says is what the metrics say, and it can be read whatever became of the run."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from train_cases import half_a, run, trainer

from relax_gym.errors import TrainingError
from relax_gym.lines import read_lines
from relax_gym.testing import RecordingLearner
from relax_gym.timeline import (
    EPISODES,
    LEARNER,
    Event,
    Timeline,
    count,
    earlier_timelines,
    learner_span,
    now,
    read_timeline,
    span,
)
from relax_gym.types import Batch, Metrics

LAPS = ("rollout_wait", "train", "publish", "write")


def spans(events: list[Event], process: int) -> list[Event]:
    return [event for event in events if event["ph"] == "X" and event["pid"] == process]


def check_nesting(events: list[Event]) -> None:
    """On each row, two spans are one after the other or one within the other."""
    rows: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        open_ends: list[int] = []
        for start, end in sorted(row, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)


def check_trace(path: Path) -> list[Event]:
    """The events of a file that keeps to the rules of Chrome's trace event format, and to those of Perfetto."""
    assert path.read_text().startswith("[\n{")
    events = read_timeline(path)
    named = {(event["name"], event["pid"], event["tid"]) for event in events if event["ph"] == "M"}
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert event.keys() <= {"name", "ph", "ts", "dur", "pid", "tid", "args"}
        assert ("process_name", event["pid"], 0) in named
        match event["ph"]:
            case "X":  # what was begun and has ended
                assert isinstance(event["ts"], int) and event["ts"] >= 0
                assert isinstance(event["dur"], int) and event["dur"] >= 0
                assert ("thread_name", event["pid"], event["tid"]) in named
            case "C":
                assert event["ts"] >= 0
                assert all(isinstance(value, int | float) for value in event["args"].values())
            case "M":
                assert event["name"] in ("process_name", "thread_name")
                assert isinstance(event["args"]["name"], str)
            case other:
                raise AssertionError(f"no event has phase {other!r}")
    check_nesting(events)
    return events


@pytest.fixture
def sections() -> dict[str, Any]:
    return {"train": {"steps": 4, "max_staleness": 1}, "eval": {"episodes": 2}, "checkpoint": {"every": 2}}


def test_the_spans_of_a_run_are_nested_and_add_up_to_its_metrics(tmp_path: Path, sections: dict[str, Any]) -> None:
    run(trainer(tmp_path, half_a, delay=3, **sections))
    path = tmp_path / "run" / "timeline.json"
    events = json.loads(path.read_text())  # whole, bracket and all
    assert events == check_trace(path)
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line["step"]]
    learner = spans(events, LEARNER)
    steps = [event for event in learner if event["name"] == "step"]
    assert [event["args"]["number"] for event in steps] == [1, 2, 3, 4]
    for step, line in zip(steps, lines, strict=True):
        inside = [e for e in learner if step["ts"] <= e["ts"] and e["ts"] + e["dur"] <= step["ts"] + step["dur"]]
        for name in (*LAPS, "prepare"):
            seconds = sum(event["dur"] for event in inside if event["name"] == name) / 1e6
            assert seconds == pytest.approx(line.get(f"time/{name}", 0.0), abs=2e-5)
        assert line["time/step"] == pytest.approx(sum(line[f"time/{name}"] for name in LAPS))
    assert sum(event["name"] == "evaluate" for event in learner) == 2
    assert any(event["name"] == "checkpoint" for event in learner)


def test_each_episode_has_a_row_of_its_own_while_it_lasts(tmp_path: Path, sections: dict[str, Any]) -> None:
    run(trainer(tmp_path, half_a, delay=3, **sections))
    episodes = spans(read_timeline(tmp_path / "run" / "timeline.json"), EPISODES)
    played = [event for event in episodes if event["name"] == "episode"]
    assert len(played) == 4 * 2 * 4 + 2 * 2
    assert {event["args"]["id"] for event in played} >= {f"{slot}-{index}" for slot in range(8) for index in range(4)}
    assert {event["name"] for event in episodes} == {"episode", "sample", "env", "reward"}
    assert sum(event["name"] == "sample" for event in episodes) == len(played)
    assert len({event["tid"] for event in played}) <= 16  # two steps' groups: rows are used again


def test_counters_say_what_is_in_flight_and_the_version(tmp_path: Path, sections: dict[str, Any]) -> None:
    run(trainer(tmp_path, half_a, delay=3, **sections))
    counters = [event for event in read_timeline(tmp_path / "run" / "timeline.json") if event["ph"] == "C"]
    groups = [event["args"] for event in counters if event["name"] == "groups"]
    versions = [event["args"]["sampler"] for event in counters if event["name"] == "version"]
    assert versions == [0, 1, 2, 3, 4]
    assert max(group["in flight"] for group in groups) == 4
    assert groups[-1] == {"in flight": 0, "waiting": 0}
    assert all(one != other for one, other in itertools.pairwise(groups))


class Fails(RecordingLearner):
    def step(self, batch: Batch) -> Metrics:
        if self.version == 1:
            raise TrainingError("enough")
        return super().step(batch)


def test_a_run_that_goes_on_keeps_the_timeline_of_before(tmp_path: Path) -> None:
    sections = {"train": {"steps": 2}, "checkpoint": {"every": 1}}
    with pytest.raises(BaseExceptionGroup):
        run(trainer(tmp_path, half_a, Fails(), **sections))
    run(trainer(tmp_path, half_a, resume=True, **sections))
    for name, number in (("timeline-1.json", 1), ("timeline.json", 2)):
        learner = spans(check_trace(tmp_path / "run" / name), LEARNER)
        trained = [event["args"]["number"] for event in learner if event["name"] == "step"]
        assert number in trained


def test_each_resume_begins_a_timeline_and_harms_none(tmp_path: Path) -> None:
    for steps in (1, 2, 3):
        run(trainer(tmp_path, half_a, resume=steps > 1, train={"steps": steps}))
    files = [*earlier_timelines(tmp_path / "run"), tmp_path / "run" / "timeline.json"]
    assert [path.name for path in files] == ["timeline-1.json", "timeline-2.json", "timeline.json"]
    for number, path in enumerate(files, start=1):
        assert json.loads(path.read_text())
        learner = spans(check_trace(path), LEARNER)
        assert [event["args"]["number"] for event in learner if event["name"] == "step"] == [number]


def grown(path: Path, before: int) -> bool:
    """Whether there is another file than before with some events."""
    try:
        found = path.stat()
    except FileNotFoundError:  # the earlier one has been moved
        return False
    return found.st_ino != before and found.st_size > 2000


def test_what_kill_9_leaves_is_a_trace(tmp_path: Path) -> None:
    path, seen = tmp_path / "run" / "timeline.json", 0
    for _ in range(5):
        pid = os.fork()
        if pid == 0:
            try:
                resume = (tmp_path / "run" / "config.toml").exists()
                run(trainer(tmp_path, half_a, resume=resume, train={"steps": 10**6}))
            finally:
                os._exit(1)
        while not grown(path, seen):
            assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the run has ended"
            time.sleep(0.001)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        seen = path.stat().st_ino
        assert spans(check_trace(path), EPISODES)
    assert len([check_trace(path) for path in earlier_timelines(tmp_path / "run")]) == 4


def test_a_trace_may_end_anywhere(tmp_path: Path) -> None:
    run(trainer(tmp_path, half_a))
    path = tmp_path / "run" / "timeline.json"
    whole, content = read_timeline(path), path.read_bytes()
    for length in (*range(0, 300, 3), *range(len(content) - 300, len(content))):
        path.write_bytes(content[:length])
        events = read_timeline(path)
        assert events == whole[: len(events)]
        assert len(events) >= content[:length].count(b"\n{") - 1


def test_no_timeline_where_none_is_wanted(tmp_path: Path) -> None:
    run(trainer(tmp_path, half_a, timeline={"max_mib": 0}))
    assert not list((tmp_path / "run").glob("timeline*"))


def test_the_size_is_bounded_and_the_newest_half_kept(tmp_path: Path) -> None:
    async def write() -> None:
        with Timeline(tmp_path, max_mib=0.02):
            for number in range(1000):
                with learner_span("step", number=number):
                    await asyncio.sleep(0)

    asyncio.run(write())
    files = [*earlier_timelines(tmp_path), tmp_path / "timeline.json"]
    assert len(files) == 2
    assert sum(file.stat().st_size for file in files) < 0.02 * 2**20 + 1000
    numbers = [event["args"]["number"] for file in files for event in spans(json.loads(file.read_text()), LEARNER)]
    assert numbers == list(range(numbers[0], 1000))
    assert len(numbers) > 50


def test_what_a_killed_run_leaves_can_be_read_at_any_time(tmp_path: Path) -> None:
    async def write() -> None:
        with Timeline(tmp_path, max_mib=1):
            for number in range(300):
                count("groups", waiting=number)
                if number % 50 == 0:
                    with learner_span("step", number=number):
                        pass
                    text = (tmp_path / "timeline.json").read_text()
                    assert not text.endswith("]\n")
                    seen = read_timeline(tmp_path / "timeline.json")
                    assert [e["args"]["waiting"] for e in seen if e["ph"] == "C"] == list(range(number + 1))

    asyncio.run(write())


def test_a_timeline_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def write() -> None:
        with Timeline(tmp_path / "gone", max_mib=1), learner_span("step"):
            assert now() > 0
        with span("sample"):
            pass

    asyncio.run(write())
    assert "timeline.json, which ends here" in caplog.text
