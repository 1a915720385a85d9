"""The examples learn from pixels, frames and sound: with media of other episodes, the same runs stay at chance."""

from pathlib import Path

import pytest

from relax_gym.config import load_config
from relax_gym.run_folder import read_lines
from relax_gym.train import train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
EXAMPLES = Path(__file__).parent.parent / "examples"


def held_out(example: str, folder: Path, *overrides: str) -> tuple[float, float]:
    """Accuracy before and after RL."""
    own = [f"run_dir={folder}", "threads=1", "trackers=[]", "eval.every=0"]
    train(load_config(EXAMPLES / f"{example}.toml", [*own, *overrides]))
    lines = [line for line in read_lines(folder / "metrics.jsonl") if "eval/reward" in line]
    assert all(line["eval/errors"] == 0 for line in lines)
    return lines[0]["eval/accuracy"], lines[-1]["eval/accuracy"]


@pytest.mark.parametrize(
    ("example", "rise", "reached"),
    [("tiny_image", 0.2, 0.8), ("tiny_video", 0.1, 0.75), ("tiny_audio", 0.4, 0.75)],
)
def test_rl_raises_what_is_held_out(example: str, rise: float, reached: float, tmp_path: Path) -> None:
    before, after = held_out(example, tmp_path / "run")
    assert after >= reached
    assert after - before >= rise


@pytest.mark.parametrize(("example", "chance"), [("tiny_audio", 1 / 3), ("tiny_video", 1 / 4)])
def test_nothing_is_learned_from_media_of_other_episodes(example: str, chance: float, tmp_path: Path) -> None:
    _, after = held_out(example, tmp_path / "run", "env.0.kwargs.shuffle_media=true")
    assert after <= chance + 0.15  # three standard errors of 100 episodes
