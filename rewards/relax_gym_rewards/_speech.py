"""What the word and character error rates have in common."""

from __future__ import annotations

import unicodedata

from relax_gym.errors import RewardError
from relax_gym.types import Trajectory
from relax_gym_rewards._answers import answer_text, references, stated_answer


def transcripts(trajectory: Trajectory, field: str, reward: str, *, normalise: bool) -> tuple[str, list[str]]:
    """What the model heard and what was said. Raises RewardError when nothing was said."""
    clean = plain if normalise else _spaced
    said = [clean(text) for text in references(trajectory, field, reward)]
    if not all(said):
        raise RewardError(f"{reward}: info[{field!r}] holds a text without words; leave silent clips out")
    return clean(stated_answer(answer_text(trajectory))), said


def plain(text: str) -> str:
    """Small letters, one form of each character (NFKC), no punctuation but apostrophes in words, single spaces."""
    text = unicodedata.normalize("NFKC", text).casefold().replace("’", "'")
    kept = (" " if unicodedata.category(character)[0] in "PS" and character != "'" else character for character in text)
    return " ".join(word for word in (part.strip("'") for part in "".join(kept).split()) if word)


def _spaced(text: str) -> str:
    return " ".join(text.split())
