"""What `relax-gym rewards show` and docs/rewards.md say of the built-in rewards beside their docstrings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Facts:
    """`range` of the score, and `example`, what stands in the `kwargs` of a `[[reward]]`."""

    range: str
    example: str = ""


FACTS = {
    "bleu": Facts("0 to 1", 'tokenize = "intl"'),
    "cer": Facts("0 to 1", "normalise = false"),
    "chrf": Facts("0 to 1", "word_order = 2"),
    "code": Facts("0 to 1", 'score = "all", seconds = 10.0'),
    "dapo_math": Facts("1 or `wrong`", "wrong = 0.0"),
    "deepscaler_math": Facts("0 or 1", "thinking = false"),
    "em": Facts("0 or 1", 'field = "answers"'),
    "env": Facts("the env's"),
    "exact_match": Facts("0 or 1", "ignore_case = false"),
    "f1": Facts("0 to 1", 'field = "answers"'),
    "first_failure": Facts("that of its terms", 'rewards = [{ name = "format" }, { name = "math" }]'),
    "format": Facts("0 or 1", 'tags = ["think", "answer"]'),
    "gate": Facts("0, or that of its last term", 'rewards = [{ name = "format" }, { name = "math" }]'),
    "genrm": Facts(
        "0 to 1, or what `words` are worth",
        'endpoint = "http://localhost:30000/v1", model = "judge", rubric = "Is it right?"',
    ),
    "genrm_group": Facts("0 to 1", 'endpoint = "http://localhost:30000/v1", model = "judge", mode = "pairs"'),
    "geo3k": Facts("0 to 1", "format_weight = 0.2"),
    "gpqa": Facts("0 or 1", 'choices = "options"'),
    "gsm8k": Facts("0 or 1", "strict = true"),
    "ifbench": Facts("0 to 1", 'score = "all"'),
    "iou": Facts("0 to 1", "threshold = 0.5"),
    "json_schema": Facts("0 or 1", 'schema = { type = "object", required = ["city"] }'),
    "length": Facts("-`penalty` to 0", "max_length = 1024, buffer = 256"),
    "math": Facts("0 or 1", "timeout = 2.0"),
    "multiple_choice": Facts("0 or 1", 'letters = "ABCD"'),
    "numeric": Facts("0 or 1", "tolerance = 0.01"),
    "openr1mm": Facts("0 to 1", "format_weight = 0.2"),
    "point": Facts("0 or 1", 'coordinates = "thousand"'),
    "product": Facts("that of its terms", 'rewards = [{ name = "format" }, { name = "math" }]'),
    "random": Facts("`low` to `high`", "seed = 1"),
    "regex": Facts("0 or 1", 'pattern = "^[0-9]+$"'),
    "remote": Facts("what the service gives", 'url = "http://localhost:9000/score", key_env = "SCORER_KEY"'),
    "repetition": Facts("-`penalty` to 0", "n = 4, penalty = 0.5"),
    "tool_use": Facts("0 to 1", 'required = [{ name = "search", arguments = { query = "x" } }]'),
    "turn_penalty": Facts("at most 0", "per_turn = 0.05"),
    "weighted_sum": Facts("that of its terms", 'rewards = [{ name = "format" }, { name = "math" }]'),
    "wer": Facts("0 to 1", "normalise = false"),
}
