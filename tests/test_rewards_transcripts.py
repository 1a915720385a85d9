"""Rewards of transcripts and translations: word and character error rates, BLEU and chrF."""

from __future__ import annotations

import time
from typing import Any

import jiwer
import pytest
import sacrebleu
from reward_kit import episode

from relax_gym.errors import RewardError
from relax_gym.testing import check_reward
from relax_gym_rewards.bleu import BLEU
from relax_gym_rewards.cer import CER
from relax_gym_rewards.chrf import ChrF
from relax_gym_rewards.wer import WER

HUGE = 100_000
CAT = "the cat sat on the mat"  # 6 words, 22 characters

SPEECH = [
    # action, reference, wer, cer
    ("the cat sat on the mat", CAT, 1.0, 1.0),
    ("The cat sat on the mat.", CAT, 1.0, 1.0),
    ("THE CAT, SAT ON -- THE MAT!", CAT, 1.0, 1.0),
    ("the cat sat on the hat", CAT, 5 / 6, 21 / 22),
    ("the cat sat on mat", CAT, 5 / 6, 18 / 22),
    ("the cat sat on the the mat", CAT, 5 / 6, 18 / 22),
    ("the", CAT, 1 / 6, 3 / 22),
    ("", CAT, 0.0, 0.0),
    ("...", CAT, 0.0, 0.0),
    ("dog", "cat", 0.0, 0.0),
    ("cat cat", "cat", 0.0, 0.0),
    ("cats", "cat", 0.0, 2 / 3),
    ("it's", "it’s", 1.0, 1.0),
    ("its", "it's", 0.0, 3 / 4),
    ("'cat'", "cat", 1.0, 1.0),
    ("ｃａｔ", "cat", 1.0, 1.0),
    ("cafe\u0301", "café", 1.0, 1.0),
    ("5", 5, 1.0, 1.0),
    ("five", 5, 0.0, 0.0),
    ("今天天气好", "今天天气很好", 0.0, 5 / 6),
    ("a b", ["c d", "a c"], 1 / 2, 2 / 3),
    ("<think>cat</think>dog", "cat", 0.0, 0.0),
    ("<think>cat", "cat", 0.0, 0.0),
    ("I heard <answer>cat</answer>", "cat", 1.0, 1.0),
    ("cat " * HUGE, CAT, 0.0, 0.0),
]


def edits(one: Any, other: Any) -> int:
    """Levenshtein's distance."""
    row = list(range(len(other) + 1))
    for i, left in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, right in enumerate(other, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (left != right))
    return row[-1]


@pytest.mark.parametrize(("action", "answer", "wer", "cer"), SPEECH)
def test_wer_and_cer(action: str, answer: Any, wer: float, cer: float) -> None:
    finished = episode("something else", action, answer=answer)
    assert WER()(finished) == pytest.approx(wer, abs=1e-12)
    assert CER()(finished) == pytest.approx(cer, abs=1e-12)


@pytest.mark.parametrize(
    ("action", "answer"),
    [(CAT, CAT), ("the cat", CAT), ("The dog sat", CAT), ("x y z", CAT), ("a b c d", "a x c"), ("mat the on cat", CAT)],
)
def test_wer_and_cer_agree_with_jiwer_and_with_the_edit_distance(action: str, answer: str) -> None:
    finished = episode(action, answer=answer)
    wer, cer = WER(normalise=False)(finished), CER(normalise=False)(finished)
    assert wer == pytest.approx(max(0, 1 - jiwer.wer(answer, action)), abs=1e-12)
    assert cer == pytest.approx(max(0, 1 - jiwer.cer(answer, action)), abs=1e-12)
    assert wer == pytest.approx(max(0, 1 - edits(action.split(), answer.split()) / len(answer.split())), abs=1e-12)
    assert cer == pytest.approx(max(0, 1 - edits(action, answer) / len(answer)), abs=1e-12)


def test_without_normalisation_case_and_punctuation_count() -> None:
    assert WER(normalise=False)(episode("The cat  sat on the mat.", answer=CAT)) == pytest.approx(4 / 6)
    assert CER(normalise=False)(episode("The cat  sat on the mat.", answer=CAT)) == pytest.approx(20 / 22)


TRANSLATIONS = [
    # action, reference, bleu, chrf
    (CAT, CAT, 1.0, 1.0),
    ("the cat", CAT, 0.1353352832, 0.2725331541),  # all n-grams right, a third as long: exp(1 - 3)
    ("the cat sat on a mat", CAT, 0.5372849659, 0.6597965989),  # (5/6 · 3/5 · 2/4 · 1/3) ** (1/4)
    ("mat the on sat cat the", CAT, 0.1270331870, 0.3368055556),
    ("The cat sat on the mat.", CAT, 0.6147881530, 0.9172483478),
    ("a dog", CAT, 0.0, 0.0347222222),
    ("", CAT, 0.0, 0.0),
    ("cat", "cat", 1.0, 1.0),
    ("cat", "dog", 0.0, 0.0),
    ("x", "", 0.0, 0.0),
    ("abc", "abd", 0.0, 7 / 18),  # characters: 2 of 3, 1 of 2 and 0 of 1
    ("7", 7, 1.0, 1.0),
    ("７", 7, 0.0, 0.0),
    ("a dog", [CAT, "a dog"], 1.0, 1.0),
    ("a dog", ["a dog", CAT], 1.0, 1.0),
    (f"<think>{CAT}</think>a dog", CAT, 0.0, 0.0347222222),
    (f"<think>{CAT}", CAT, 0.0, 0.0),
    (f"So: <answer>{CAT}</answer>", CAT, 1.0, 1.0),
    ("the the the the the the", CAT, 0.0965243488, None),  # (2/6 · 1/10 · 1/16 · 1/24) ** (1/4), smoothed
    ("the " * HUGE, CAT, None, None),
]


@pytest.mark.parametrize(("action", "answer", "bleu", "chrf"), TRANSLATIONS)
def test_bleu_and_chrf(action: str, answer: Any, bleu: float | None, chrf: float | None) -> None:
    finished = episode("something else", action, answer=answer)
    scores = BLEU()(finished), ChrF()(finished)
    assert scores[0] == (pytest.approx(bleu, abs=1e-9) if bleu is not None else pytest.approx(0, abs=0.01))
    assert scores[1] == (pytest.approx(chrf, abs=1e-9) if chrf is not None else pytest.approx(0, abs=0.3))


@pytest.mark.parametrize("action", ["the cat sat on the mat", "The cat is on a mat", "mat", "", "die Katze"])
def test_bleu_and_chrf_agree_with_sacrebleu(action: str) -> None:
    finished = episode(action, answer=[CAT, "a cat is on the mat"])
    allowed = finished.info["answer"]
    bleu = sacrebleu.sentence_bleu(action, allowed, use_effective_order=True, lowercase=True).score / 100
    assert BLEU(lowercase=True)(finished) == pytest.approx(bleu, abs=1e-9)
    chrf = sacrebleu.sentence_chrf(action, allowed, word_order=2).score / 100
    assert ChrF(word_order=2)(finished) == pytest.approx(chrf, abs=1e-9)


def test_bleu_of_a_script_without_spaces_needs_its_tokenizer() -> None:
    finished = episode("今天天气好", answer="今天天气很好")
    assert BLEU()(finished) == 0.0
    assert BLEU(tokenize="zh")(finished) == pytest.approx(
        0.5789300674, abs=1e-9
    )  # exp(-1/5) · (5/5 · 3/4 · 2/3 · 1/2)^¼


@pytest.mark.parametrize("reward", [WER(), CER(), BLEU(), ChrF()], ids=["wer", "cer", "bleu", "chrf"])
def test_a_crafted_answer_is_scored_soon(reward: Any) -> None:
    started = time.process_time()
    for text in ("x" * HUGE, "x " * (HUGE // 2), "." * HUGE, "'" * HUGE, "<answer>" * (HUGE // 8)):
        assert 0 <= reward(episode(text, answer=CAT)) < 0.5
    assert time.process_time() - started < 10


@pytest.mark.parametrize("reward", [WER(), CER(), BLEU(), ChrF()], ids=["wer", "cer", "bleu", "chrf"])
@pytest.mark.parametrize("answer", [{"a": 1}, [], [None], True, b"a"], ids=repr)
def test_a_reference_of_a_wrong_type_leaves_the_episode_unscored(reward: Any, answer: Any) -> None:
    with pytest.raises(RewardError, match=r"info\['answer'\] is .*; it must be a text, a number or a list of these"):
        reward(episode("a", answer=answer))


@pytest.mark.parametrize("reward", [WER(), CER()], ids=["wer", "cer"])
def test_a_silent_reference_leaves_the_episode_unscored(reward: Any) -> None:
    with pytest.raises(RewardError, match="holds a text without words; leave silent clips out"):
        reward(episode("a", answer=["a", "..."]))


def test_bad_options_are_refused() -> None:
    with pytest.raises(RewardError, match="bleu: tokenize is 'de'; it must be one of '13a', 'intl', 'zh'"):
        BLEU(tokenize="de")
    with pytest.raises(RewardError, match=r"chrf: word_order is 2\.5; it must be a whole number from 0 to 4"):
        ChrF(word_order=2.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("reward", [WER(), CER(), BLEU(), ChrF()], ids=["wer", "cer", "bleu", "chrf"])
def test_they_keep_the_contract_of_rewards(reward: Any) -> None:
    results = check_reward(reward, [episode("b", CAT, answer=CAT), episode("", answer=["a", "b c"])])
    assert [result.name for result in results if not result.passed] == []
