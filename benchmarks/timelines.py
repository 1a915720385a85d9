"""Pictures of the timelines of runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from relax_gym.timeline import LEARNER, Event, read_timeline

COLOURS = {"train": "C0", "prepare": "C9", "publish": "C3", "sample": "C2"}


def learner_spans(file: Path, name: str) -> list[Event]:
    """What the learner's row of a timeline says of `name`."""
    events = read_timeline(file)
    return [event for event in events if event["pid"] == LEARNER and event["ph"] == "X" and event["name"] == name]


def draw(files: Mapping[str, tuple[Path, int]], picture: Path, *, steps: int) -> None:
    """The same number of seconds of each timeline, from the step named with it, counted from 0, and as many as so many
    steps of the first timeline take: learner above, one thin line for each row of episodes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(files), 1, sharex=True, squeeze=False)[:, 0]
    file, first = next(iter(files.values()))
    shown = learner_spans(file, "step")[first:][: steps + 1]
    width = (shown[-1]["ts"] - shown[0]["ts"]) / 1e6
    for axis, (title, (file, first)) in zip(axes, files.items(), strict=True):
        origin = learner_spans(file, "step")[first]["ts"]
        bars: defaultdict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)  # by row; the learner's is 0
        for event in read_timeline(file):
            start, seconds = (event.get("ts", 0) - origin) / 1e6, event.get("dur", 0) / 1e6
            if event["name"] in COLOURS and start < width and start + seconds > 0:
                row = 0 if event["pid"] == LEARNER else event["tid"]
                bars[row, COLOURS[event["name"]]].append((start, seconds))
        rows = max(row for row, _ in bars)
        for (row, colour), spans in bars.items():
            axis.broken_barh(spans, (-row, 0.8) if row else (1.0, rows / 8), color=colour)
        axis.set_xlim(0, width)
        axis.set_ylim(-1 - rows, 2 + rows / 8)
        axis.set_title(title, fontsize=10)
        axis.set_yticks([1 + rows / 16, -rows / 2], ["learner", "episodes"])
    axes[-1].set_xlabel("seconds   (blue: train, light blue: prepare, red: publish, green: sample)")
    figure.savefig(picture, dpi=110)
