"""Draws the learning curve of a run from its metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

from relax_gym.lines import read_lines


def draw_curve(metrics_path: Path, picture: Path) -> None:
    """Write a PNG with sampled training reward and held-out reward against optimizer steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = read_lines(metrics_path)
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for key, label, style in (
        ("reward/mean", "training episodes (sampled)", {"color": "#8aa6c1", "marker": "."}),
        ("eval/reward", "held-out episodes", {"color": "#c1440e", "marker": "o", "linewidth": 2}),
    ):
        points = [(r["step"], r[key]) for r in records if r.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("mean reward")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    figure.savefig(picture, dpi=130)
