"""The filter that compares the groups of a step with each other, in the loop."""

from collections import Counter
from pathlib import Path

from train_cases import half_a, run, trainer

from relax_gym.lines import read_lines
from relax_gym.testing import RecordingLearner


def test_k76_groups_outside_the_quantiles_are_counted_kept_on_disk_and_not_trained_on(tmp_path: Path) -> None:
    learner = RecordingLearner()
    options = {"name": "grpo", "filter_quantiles": [0.25, 0.75]}
    run(trainer(tmp_path, half_a, learner, algorithm=options, train={"steps": 3, "groups_per_step": 8}))
    episodes = read_lines(tmp_path / "run" / "episodes.jsonl")
    for step, (line, batch) in enumerate(
        zip(read_lines(tmp_path / "run" / "metrics.jsonl"), learner.batches, strict=True), start=1
    ):
        means = Counter[str]()
        for episode in (e for e in episodes if e["step"] == step):
            means[episode["group_id"]] += episode["reward"] / 4
        ordered = sorted(means.values())
        inside = {name for name, mean in means.items() if ordered[2] <= mean <= ordered[5]}
        dropped = [line.get(f"queue/dropped_mean_{side}_quantile", 0) for side in ("below", "above")]
        assert {sample.group_id for sample in batch.samples} == inside
        assert line["reward/mean"] == sum(means.values()) / 8  # of all that were played: a filter must not flatter it
        assert sum(dropped) == line["queue/empty_slots"] == 8 - len(inside)
        assert dropped == [sum(m < ordered[2] for m in means.values()), sum(m > ordered[5] for m in means.values())]
        kinds = {e["group_id"]: e["kind"] for e in episodes if e["step"] == step}
        assert {name for name, kind in kinds.items() if kind == "train"} == inside
    assert {"mean_below_quantile", "mean_above_quantile"} <= {e["kind"] for e in episodes}
