"""Questions about charts: the pixels show the values, and answers are what the chart says."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from image_env_kit import make, pictures

from relax_gym.errors import ConfigError
from relax_gym_envs._charts import COLOURS


@pytest.mark.parametrize("seed", range(12))
def test_bars_are_as_high_as_their_values(seed: int) -> None:
    env = make("ChartQuestion", charts=["bar"], size=400)
    (picture,) = pictures(env.reset(seed=seed)[0])
    heights = [(np.abs(picture.astype(int) - COLOURS[c]).sum(axis=-1) < 6).any(axis=1).sum() for c in env.chart.colours]
    scale = 400 * 0.83 / 100
    np.testing.assert_allclose(heights, [value * scale for value in env.chart.values], atol=4)


@pytest.mark.parametrize("seed", range(12))
def test_slices_are_as_large_as_their_share(seed: int) -> None:
    env = make("ChartQuestion", charts=["pie"], size=400, questions=["highest"])
    (picture,) = pictures(env.reset(seed=seed)[0])
    pie = picture[:, :264].astype(int)
    areas = np.array([(np.abs(pie - COLOURS[colour]).sum(axis=-1) < 6).sum() for colour in env.chart.colours])
    shares = np.array(env.chart.values) / sum(env.chart.values)
    np.testing.assert_allclose(areas / areas.sum(), shares, atol=0.02)
    assert env.expert_action() == env.chart.labels[int(areas.argmax())]


def test_answers_to_chart_questions_are_what_the_chart_says() -> None:
    starts = ("What is the value", "What is the difference", "Which colour", "How many", "Which label")
    asked = set[str]()
    env = make("ChartQuestion", bars=5, turns=3, same_chart=True, charts=["bar"], size=64)
    for seed in range(60):
        env.reset(seed=seed)
        for _ in range(3):
            text, answer, chart = env.question.text, env.expert_action(), env.chart
            named = dict(zip(chart.labels, zip(chart.values, chart.colours, strict=True), strict=True))
            word = text.rstrip("?").split()[-1]
            if text.startswith("What is the difference"):
                assert answer == str(abs(named[word][0] - named[text.split()[5]][0]))
            elif text.startswith("What is the value"):
                assert answer == str(named[word][0])
            elif text.startswith("Which colour"):
                assert answer == named[word][1]
            elif text.startswith("How many"):
                assert answer == str(sum(value > int(word) for value in chart.values))
            else:
                pick = max if "highest" in text else min
                assert answer == pick(named, key=lambda label: named[label][0])
            asked.add(next(start for start in starts if text.startswith(start)))
            env.step(answer)
    assert asked == set(starts)


@pytest.mark.parametrize(
    ("style", "tolerance", "said", "right"),
    [
        ("plain", 5, "About {over5}.", True),
        ("plain", 5, "About {over6}.", False),
        ("plain", 5, "no idea", False),
        ("plain", 0, "About {over5}.", False),
        ("plain", 0, "I think {over0}.", True),
        ("terse", 5, "{over5}", True),
        ("terse", 5, "{over5}.", False),
    ],
)
@pytest.mark.parametrize("kind", ["value", "difference"])
def test_read_off_numbers_may_be_as_far_off_as_is_tolerated(
    kind: str, style: str, tolerance: int, said: str, right: bool
) -> None:
    env = make("ChartQuestion", questions=[kind], tolerance=tolerance, style=style, size=64)
    for seed in range(5):
        env.reset(seed=seed)
        truth = int(env.expert_action())
        text = said.format(over0=truth, over5=truth + 5, over6=truth + 6)
        assert env.step(text)[1] == float(right)


@pytest.mark.parametrize(("bars", "most"), [(2, 0.38), (4, 0.27), (6, 0.27)])
def test_a_limit_does_not_tell_how_many_are_above_it(bars: int, most: float) -> None:
    env = make("ChartQuestion", questions=["above"], charts=["bar"], bars=bars, size=64)
    answers = dict[str, Counter[str]]()
    for seed in range(1500):
        env.reset(seed=seed)
        answers.setdefault(env.question.text, Counter())[env.expert_action()] += 1
    assert sum(max(counted.values()) for counted in answers.values()) / 1500 < most
    assert set().union(*answers.values()) == set(env.question.options)


def test_pies_are_asked_only_what_they_show() -> None:
    env = make("ChartQuestion", questions=["value", "above"], size=64)
    kinds = Counter[str]()
    for seed in range(40):
        env.reset(seed=seed)
        kinds[env.chart.kind] += 1
    assert set(kinds) == {"bar", "line"}
    with pytest.raises(ConfigError, match="a pie has no scale"):
        make("ChartQuestion", charts=["pie"], questions=["value"])


def test_follow_up_questions_do_not_show_the_chart_again() -> None:
    for same_chart, shown in ((True, 0), (False, 1)):
        env = make("ChartQuestion", turns=2, same_chart=same_chart, size=64)
        (first,) = pictures(env.reset(seed=0)[0])
        kept = first.copy()
        observation, reward, *_ = env.step(env.expert_action())
        assert (len(pictures(observation)), reward) == (shown, 0.5)
        assert np.array_equal(first, kept)
        assert not any(np.shares_memory(first, later) for later in pictures(observation))
