"""The examples learn from pixels, frames and sound: with media of other episodes, the same runs stay at chance."""

from pathlib import Path

import pytest

from relax_gym.config import load_config
from relax_gym.lines import read_lines
from relax_gym.train import train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
EXAMPLES = Path(__file__).parent.parent / "examples"
LUCK = 0.15  # three standard errors of the accuracy of 100 episodes, at most


def accuracies(example: str, folder: Path, *overrides: str) -> tuple[float, float]:
    """Of held-out episodes, before and after RL."""
    own = [f"run_dir={folder}", "threads=1", "trackers=[]", "eval.every=0"]
    train(load_config(EXAMPLES / f"{example}.toml", [*own, *overrides]))
    lines = [line for line in read_lines(folder / "metrics.jsonl") if "eval/reward" in line]
    assert all(line["eval/errors"] == 0 for line in lines)
    before, after = (line["eval/accuracy"] for line in lines)
    return before, after


# Without looking, the best three moves reach the goal from 7 of the 12 starts of tiny_image.
@pytest.mark.parametrize(
    ("example", "blind"),
    [
        pytest.param("tiny_image", 7 / 12, marks=pytest.mark.long),
        pytest.param("tiny_video", 1 / 4, marks=pytest.mark.long),
        ("tiny_audio", 1 / 3),
    ],
)
class TestExample:
    def test_rl_raises_what_is_held_out_beyond_chance(self, example: str, blind: float, tmp_path: Path) -> None:
        before, after = accuracies(example, tmp_path / "run")
        assert after >= max(0.85, blind + LUCK)
        assert 1 - after <= (1 - before) / 2  # half of the errors at least

    @pytest.mark.long
    def test_nothing_is_learned_from_media_of_other_episodes(self, example: str, blind: float, tmp_path: Path) -> None:
        _, after = accuracies(example, tmp_path / "run", "env.0.kwargs.shuffle_media=true")
        assert after <= blind + LUCK
