"""One way of writing for answers that mean the same, by rewriting text alone: nothing is computed or evaluated."""

from __future__ import annotations

import re

from relax_gym_rewards._answers import boxed

_GONE = (
    "\\left",
    "\\right",
    "\\!",
    "\\,",
    "\\;",
    "\\:",
    "\\ ",
    "\\$",
    "$",
    "\\(",
    "\\)",
    "\\[",
    "\\]",
    "\\%",
    "%",
    "~",
)
_SAME = (
    ("\\dfrac", "\\frac"),
    ("\\tfrac", "\\frac"),
    ("\\cdot", "*"),
    ("\\times", "*"),
    ("−", "-"),
    ("\\lbrace", "\\{"),
)
_DEGREES = re.compile(r"\^\s?\{?\s?\\circ\s?\}?|°")
_WORDS = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox|operatorname)\s?\{([^{}]{0,100})\}")
_SHORT_FRACTION = re.compile(r"\\frac([0-9])([0-9])(?![0-9])")
_SLASH = re.compile(r"(?<![\w./])([0-9]{1,20})/([0-9]{1,20})(?![\w./])")
_SHORT_ROOT = re.compile(r"\\sqrt([0-9A-Za-z])")
_THOUSANDS = re.compile(r"(?<![0-9,.])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])")
_BARE_POINT = re.compile(r"(?<![0-9])\.(?=[0-9])")
_ZEROS = re.compile(r"(?<![0-9.])([0-9]+)\.0{1,100}(?![0-9])")
_NAMED = re.compile(r"^[A-Za-z]=(?=.)")
_UNIT = re.compile(
    r"(?<=[0-9}])\s{0,3}(?:degrees?|units?|dollars?|cents?|cm|km|mm|inch(?:es)?|feet|meters?|hours?)\.?$"
)
LONGEST = 1000


def plain_latex(answer: str) -> str:
    r"""The answer without box, dollars, spaces, `\text`, `\left`, degree and percent signs, units and "x =".

    `1,234`, `.5`, `7.0`, `\dfrac12`, `\frac12` and `1/2` become `1234`, `0.5`, `7`, `\frac{1}{2}`. One that is longer
    than 1000 characters is only stripped.
    """
    text = answer.strip()
    if len(text) > LONGEST:
        return text
    inside = boxed(text)
    text = text if inside is None else inside
    for mark in _GONE:
        text = text.replace(mark, "")
    for old, new in _SAME:
        text = text.replace(old, new)
    text = _DEGREES.sub("", _WORDS.sub(r" \1", text)).strip().rstrip(".").strip("*_ ")
    text = _UNIT.sub("", text)
    text = _THOUSANDS.sub(lambda found: found[0].replace(",", ""), "".join(text.split()))
    text = _NAMED.sub("", text)
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text))
    text = _SLASH.sub(r"\\frac{\1}{\2}", text)
    return _ZEROS.sub(r"\1", _BARE_POINT.sub("0.", text))
