"""Whatever a policy writes, every reward of text and numbers gives one finite score, soon, or a reason."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import pytest
from reward_kit import episode

from relax_gym.errors import RewardError
from relax_gym.metrics import episode_metrics
from relax_gym.scoring import WeightedReward, score
from relax_gym_rewards.bleu import BLEU
from relax_gym_rewards.cer import CER
from relax_gym_rewards.chrf import ChrF
from relax_gym_rewards.dapo_math import DAPOMath
from relax_gym_rewards.em import EM
from relax_gym_rewards.exact_match import ExactMatch
from relax_gym_rewards.f1 import F1
from relax_gym_rewards.format import Format
from relax_gym_rewards.gpqa import GPQA
from relax_gym_rewards.gsm8k import GSM8K
from relax_gym_rewards.ifbench import IFBench
from relax_gym_rewards.iou import IoU
from relax_gym_rewards.json_schema import JsonSchema
from relax_gym_rewards.length import Length
from relax_gym_rewards.multiple_choice import MultipleChoice
from relax_gym_rewards.numeric import Numeric
from relax_gym_rewards.point import Point
from relax_gym_rewards.random import Random
from relax_gym_rewards.regex import Regex
from relax_gym_rewards.repetition import Repetition
from relax_gym_rewards.wer import WER

REWARDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "bleu": (BLEU(), {"answer": "the cat sat"}),
    "cer": (CER(), {"answer": "the cat sat"}),
    "chrf": (ChrF(), {"answer": "the cat sat"}),
    "dapo_math": (DAPOMath(), {"answer": "5"}),
    "em": (EM(), {"answer": "the cat sat"}),
    "exact_match": (ExactMatch(), {"answer": "the cat sat"}),
    "f1": (F1(), {"answer": "the cat sat"}),
    "format": (Format(), {}),
    "gpqa": (GPQA(), {"answer": "A"}),
    "gsm8k": (GSM8K(), {"answer": "5"}),
    "ifbench": (IFBench(), {"instructions": [{"kind": "title"}, {"kind": "json"}]}),
    "iou": (IoU(), {"bbox": [1, 2, 3, 4]}),
    "json_schema": (JsonSchema(schema={"type": "object"}), {}),
    "length": (Length(max_length=10, unit="characters"), {}),
    "multiple_choice": (MultipleChoice(), {"answer": "A", "choices": ["one", "two"]}),
    "numeric": (Numeric(units="optional"), {"answer": "5 km"}),
    "point": (Point(), {"bbox": [1, 2, 3, 4]}),
    "random": (Random(), {}),
    "regex": (Regex(pattern="(a+)+$"), {}),
    "repetition": (Repetition(), {}),
    "wer": (WER(), {"answer": "the cat sat"}),
}
PIECES = [
    *("a", " ", "\n", "\t", "'", '"', "\\", "{", "[", "(", "*", "**", "-", "°", "哈", "٣", "\ud83d", "\0", "‮"),
    *("1", "1,", "1.", "1/", "1e9", "1,111,", "[1,", "[1, 2, 3, ", "(1,2)", "x=1,", "x=1,y=", "5 km ", "5^2"),
    *(
        "answer:",
        "Answer: A ",
        "Answer: A,",
        "the answer is ",
        "choice is \\text{",
        "(A",
        "A or ",
        "\\boxed{",
        "\\frac1",
    ),
    *("<think>", "</think>", "<answer>", "</answer>", "<answer>1</answer>", "#### 1", "```", '{"a":', "\\text{"),
]
SIZE = 20_000


@pytest.mark.parametrize("name", REWARDS)
def test_k81_no_text_holds_a_reward_up_or_breaks_it(name: str) -> None:
    reward, info = REWARDS[name]
    started = time.process_time()
    for piece in PIECES:
        value = reward(episode(piece * (SIZE // len(piece)), **info))
        assert isinstance(value, float) and math.isfinite(value), piece
    assert time.process_time() - started < 15  # of quadratic time it would be minutes


@pytest.mark.parametrize("name", [name for name, (_, info) in REWARDS.items() if info])
def test_a_missing_reference_names_the_field_and_the_keys(name: str) -> None:
    with pytest.raises(
        RewardError, match=r"test/Quiz-v0 left no '(answer|bbox|instructions)' in info.*its keys: 'gold'"
    ):
        REWARDS[name][0](episode("5", gold=5))


WRONG = [name for name, (_, info) in REWARDS.items() if info]


def test_k34_k74_a_wrong_reference_is_one_reason_for_each_reward_and_no_zero() -> None:
    terms = [WeightedReward(name=name, weight=1.0, reward=REWARDS[name][0]) for name in [*WRONG, "format"]]
    broken = episode("5", answer={"gold": 5}, bbox="left", instructions={})
    out = asyncio.run(score(broken, terms, timeout=30))
    assert out.rewards == {**dict.fromkeys(WRONG), "format": 0.0}
    assert out.reward is None and sorted(out.reward_failures) == sorted(WRONG)
    for name, reason in out.reward_failures.items():
        assert reason.startswith(f"{name}: info["), reason
    assert episode_metrics([out, asyncio.run(score(broken, terms[-1:], timeout=30))])["episode/unscored"] == 1.0


def test_k76_k77_shaping_is_a_number_of_its_own_beside_the_raw_score() -> None:
    terms = [
        WeightedReward(name="em", weight=1.0, reward=EM()),
        WeightedReward(name="length", weight=0.5, reward=Length(max_length=4, buffer=4, unit="characters")),
    ]
    out = asyncio.run(score(episode("ab", answer="ab"), terms, timeout=30))
    assert (out.rewards, out.reward, out.reward_parts) == ({"em": 1.0, "length": -0.25}, 0.75, {})
