"""Instructions whose following can be verified, as one table: name, arguments, and when it is followed."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Arguments = Mapping[str, Any]

RELATIONS: Mapping[str, Callable[[int, int], bool]] = {
    "at least": operator.ge,
    "at most": operator.le,
    "exactly": operator.eq,
    "less than": operator.lt,
    "more than": operator.gt,
}
WORD = re.compile(r"\w+(?:['’-]\w+)*")
BULLET = re.compile(r"^[ \t]{0,8}[*+-][ \t]{1,8}\S", re.MULTILINE)
HIGHLIGHT = re.compile(r"\*{1,2}(?!\s)[^*\n]{1,500}(?<!\s)\*{1,2}")
PLACEHOLDER = re.compile(r"\[[^\[\]\n]{1,200}\]")
TITLE = re.compile(r"<<[^<>\n]{1,200}>>")
RULE = re.compile(r"^[ \t]{0,8}(?:\*\*\*|---)[ \t]{0,8}$", re.MULTILINE)
SENTENCE_END = re.compile(r"[.!?](?=\s|$)|[。！？]")
QUOTES = (('"', '"'), ("“", "”"), ("«", "»"))


class Check(NamedTuple):
    """`followed(text, arguments)`; `needs` names the arguments and their types."""

    followed: Callable[[str, Arguments], bool]
    needs: Mapping[str, type]


COUNT: Mapping[str, type] = {"relation": str, "count": int}


def words(text: str) -> list[str]:
    """Words, in small letters; a hyphen or an apostrophe inside keeps one together."""
    return WORD.findall(text.casefold())


def occurrences(text: str, phrase: str) -> int:
    """How often a phrase stands in a text, whole words, whatever the case."""
    left, right = (r"\b" if re.match(r"\w", end) else "" for end in (phrase[:1], phrase[-1:]))
    return len(re.findall(left + re.escape(phrase.casefold()) + right, text.casefold())) if phrase else 0


def sentences(text: str) -> int:
    """How many pieces with a word in them the ends of sentences make."""
    return sum(1 for piece in SENTENCE_END.split(text) if WORD.search(piece))


def paragraphs(text: str) -> list[str]:
    """What blank lines, `***` or `---` separate."""
    return [piece.strip() for piece in re.split(r"\n[ \t]{0,8}\n", RULE.sub("\n\n", text)) if piece.strip()]


def compares(number: int, arguments: Arguments) -> bool:
    """Whether a count stands in the relation to `count`."""
    return RELATIONS[arguments["relation"]](number, arguments["count"])


def is_json(text: str) -> bool:
    """Whether the text, or the one fenced block that it is, is a JSON object or array."""
    fenced = re.fullmatch(r"```(?:json)?\n(.*)\n```", text.strip(), re.DOTALL)
    try:
        return isinstance(json.loads(fenced[1] if fenced else text), (dict, list))
    except (ValueError, RecursionError):
        return False


def has_palindrome(text: str) -> bool:
    """Whether a word of three or more letters reads the same from behind."""
    return any(len(word) > 2 and word == word[::-1] and word.isalpha() for word in words(text))


def _nth_paragraph(text: str, arguments: Arguments) -> bool:
    found, index = paragraphs(text), arguments["index"]
    return 0 < index <= len(found) and words(found[index - 1])[:1] == words(arguments["word"])[:1]


def _in_order(text: str, arguments: Arguments) -> bool:
    start, text = 0, text.casefold()
    for phrase in arguments["phrases"]:
        found = text.find(phrase.casefold(), start)
        if found < 0:
            return False
        start = found + len(phrase)
    return True


CHECKS: Mapping[str, Check] = {
    # words
    "include": Check(lambda text, a: all(occurrences(text, phrase) for phrase in a["phrases"]), {"phrases": list}),
    "avoid": Check(lambda text, a: not any(occurrences(text, phrase) for phrase in a["phrases"]), {"phrases": list}),
    "frequency": Check(lambda text, a: compares(occurrences(text, a["phrase"]), a), {"phrase": str, **COUNT}),
    "letter_frequency": Check(
        lambda text, a: compares(text.casefold().count(a["letter"].casefold()), a), {"letter": str, **COUNT}
    ),
    "in_order": Check(_in_order, {"phrases": list}),
    "palindrome": Check(lambda text, a: has_palindrome(text), {}),
    "unique_words": Check(lambda text, a: len(set(words(text))) == len(words(text)), {}),
    # lengths
    "words": Check(lambda text, a: compares(len(words(text)), a), COUNT),
    "sentences": Check(lambda text, a: compares(sentences(text), a), COUNT),
    "paragraphs": Check(lambda text, a: compares(len(paragraphs(text)), a), COUNT),
    "lines": Check(lambda text, a: compares(sum(bool(line.strip()) for line in text.splitlines()), a), COUNT),
    "characters": Check(lambda text, a: compares(len(text.strip()), a), COUNT),
    # parts
    "bullets": Check(lambda text, a: compares(len(BULLET.findall(text)), a), COUNT),
    "highlights": Check(lambda text, a: compares(len(HIGHLIGHT.findall(text)), a), COUNT),
    "placeholders": Check(lambda text, a: compares(len(PLACEHOLDER.findall(text)), a), COUNT),
    "sections": Check(lambda text, a: compares(occurrences(text, a["marker"]), a), {"marker": str, **COUNT}),
    "title": Check(lambda text, a: TITLE.search(text) is not None, {}),
    "postscript": Check(
        lambda text, a: bool(re.search(rf"^\s{{0,8}}{re.escape(a['marker'])}", text, re.M)), {"marker": str}
    ),
    "paragraph_start": Check(_nth_paragraph, {"index": int, "word": str}),
    # form
    "json": Check(lambda text, a: is_json(text), {}),
    "quoted": Check(lambda text, a: len(text.strip()) > 1 and (text.strip()[0], text.strip()[-1]) in QUOTES, {}),
    "upper_case": Check(lambda text, a: text.isupper(), {}),
    "lower_case": Check(lambda text, a: text.islower(), {}),
    "capital_words": Check(
        lambda text, a: compares(sum(word.isupper() and len(word) > 1 for word in WORD.findall(text)), a), COUNT
    ),
    "starts_with": Check(lambda text, a: text.strip().casefold().startswith(a["phrase"].casefold()), {"phrase": str}),
    "ends_with": Check(lambda text, a: text.strip().casefold().endswith(a["phrase"].casefold()), {"phrase": str}),
    "no_commas": Check(lambda text, a: not set(text) & set(",，、"), {}),
    "one_of": Check(lambda text, a: text.strip().casefold() in [o.casefold() for o in a["options"]], {"options": list}),
    "ascii": Check(lambda text, a: text.isascii(), {}),
}
