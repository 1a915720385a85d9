"""A run on pictures: checkpoints hold the model with its processor, and resuming goes on from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from relax_gym.config import MediaConfig, load_config
from relax_gym.lines import read_lines
from relax_gym.media import Image
from relax_gym.processing import MediaProcessor
from relax_gym.train import train

pytestmark = pytest.mark.usefixtures("one_thread")
EXAMPLE = Path(__file__).parent.parent / "examples/tiny_image.toml"
SMALL = {
    "threads": 1,
    "trackers": "[]",
    "model.kwargs": "{ hidden_size = 32, num_heads = 2, num_kv_heads = 1, encoder_size = 16 }",
    "warmup.steps": 1,
    "warmup.episodes_per_step": 2,
    "train.groups_per_step": 2,
    "train.group_size": 2,
    "eval.every": 0,
    "eval.episodes": 2,
}


def test_checkpoints_hold_the_processor_and_runs_resume(tmp_path: Path) -> None:
    run = tmp_path / "run"
    own = [f"{key}={value}" for key, value in SMALL.items()] + [f"run_dir={run}"]
    train(load_config(EXAMPLE, [*own, "train.steps=1"]))
    train(load_config(EXAMPLE, [*own, "train.steps=2"]), resume=True)
    steps = [line["step"] for line in read_lines(run / "metrics.jsonl") if "reward/mean" in line]
    assert steps == [1, 2]

    first, last = sorted(path for path in (run / "checkpoints").iterdir() if path.is_dir())
    picture = Image(pixels=np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))
    made = [MediaProcessor.load(folder, MediaConfig()) for folder in (first, last)]
    one, two = (processor.features(picture) for processor in made if processor)
    assert one.text == two.text and one.placeholders > 0
    assert np.array_equal(one.tensors["pixel_values"], two.tensors["pixel_values"])

    again = tmp_path / "again"
    train(load_config(EXAMPLE, [*own, f"run_dir={again}", f"model.name={last}", "model.kwargs={}", "train.steps=1"]))
    assert [line for line in read_lines(again / "metrics.jsonl") if "reward/mean" in line]
