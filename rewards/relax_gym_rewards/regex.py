"""1 when the answer matches a regular expression, else 0."""

from __future__ import annotations

from collections import deque
from typing import Any

from relax_gym.errors import RewardError
from relax_gym.types import Trajectory
from relax_gym_rewards._answers import answer_text, choice_option, library, references
from relax_gym_rewards._episode import reference


class Regex:
    """Matches what the model said last, without thinking, with RE2: linear in the text, whatever the pattern.

    `pattern`, or `info["pattern"]` without one, must be found somewhere (`match = "search"`) or be the whole text
    ("full"). With `group`, a name or a number, that group of the last match must be one of the texts in `info[field]`.
    RE2 has no backreferences and no look-around (https://github.com/google/re2/wiki/Syntax).
    """

    def __init__(
        self,
        *,
        pattern: str | None = None,
        match: str = "search",
        group: str | int | None = None,
        ignore_case: bool = False,
        field: str = "answer",
    ) -> None:
        choice_option("regex", "match", match, ("search", "full"))
        self._re2 = library("re2", "regex")
        self.match, self.group, self.ignore_case, self.field = match, group, ignore_case, field
        self._compiled = None if pattern is None else self._compile(pattern)

    def __call__(self, trajectory: Trajectory, /) -> float:
        compiled = self._compiled or self._compile(reference(trajectory, "pattern"))
        text = answer_text(trajectory).strip().encode("utf-8", "replace").decode()
        if self.match == "full":
            found = compiled.fullmatch(text)
        elif self.group is None:
            found = compiled.search(text)
        else:
            found = next(iter(deque(compiled.finditer(text), maxlen=1)), None)
        if self.group is None:
            return float(found is not None)
        allowed = references(trajectory, self.field, "regex")
        return float(found is not None and (found.group(self.group) or "").strip() in allowed)

    def _compile(self, pattern: Any) -> Any:
        if not isinstance(pattern, str):
            raise RewardError(f"regex: pattern is {pattern!r:.100}; it must be a text")
        options = self._re2.Options()
        options.case_sensitive = not self.ignore_case
        options.log_errors = False
        try:
            compiled = self._re2.compile(pattern, options)
        except self._re2.error as error:
            reason = error.args[0].decode(errors="replace")
            raise RewardError(
                f"regex: pattern is {pattern!r:.100}, which RE2 refuses: {reason}; it has no backreferences and no "
                "look-around"
            ) from error
        groups = [*range(compiled.groups + 1), *compiled.groupindex]
        if self.group is not None and (isinstance(self.group, bool) or self.group not in groups):
            raise RewardError(f"regex: group is {self.group!r}; pattern {pattern!r:.100} has the groups {groups}")
        return compiled
