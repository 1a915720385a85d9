"""Rows of a data set, one turn each."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_gym import Env, Message, StepResult, user
from relax_gym.errors import ConfigError, EnvError
from relax_gym.media import KINDS
from relax_gym_envs._rows import Row, RowOptions, check_row, load_rows, with_media
from relax_gym_envs._text import check_choice, last_number


class DatasetEnv(Env):
    """Ask the prompt of one row, take one answer.

    Args:
        path: a JSON-lines or Parquet file.
        rows: the rows themselves, a list of dicts.
        dataset: a Hugging Face data set: hub name, or a folder that `save_to_disk` wrote. Give one of these three.
        split: which split of `dataset`.
        prompt_field: field with the prompt: a string (one user message) or a list of chat messages.
        answer_field: field with the expected answer; an empty string when the rows have none.
        media: fields with images, videos or audio for prompts that are strings, such as `{"image": "photo"}`. A field
            holds one item or a list; they go where `<image>`, `<video>`, `<audio>` stand in the prompt, else before it.
        system: system message put before prompts that bring none.
        match: how the env itself scores: "none" always 0, "exact" equal but for case and outer spaces, "numeric" equal
            last numbers; both give 1 or 0.

    `info` holds the row's `answer` and the whole `row`, for rewards. `reset(options={"row": row})` plays a given row,
    otherwise the seed picks one. Episodes get copies: nothing they do reaches the data set or another episode.
    """

    def __init__(
        self,
        path: str | None = None,
        rows: Sequence[Row] | None = None,
        dataset: str | None = None,
        split: str = "train",
        prompt_field: str = "prompt",
        answer_field: str = "answer",
        media: Mapping[str, str] | None = None,
        system: str | None = None,
        match: str = "none",
    ) -> None:
        check_choice("match", match, ("none", "exact", "numeric"))
        if match != "none" and not answer_field:
            raise ConfigError(f"match = {match!r} needs answer_field; name the field with the expected answer")
        for kind in media or {}:
            check_choice("media", kind, KINDS)
        self.media, self.folder = dict(media or {}), None if path is None else Path(path).expanduser().absolute().parent
        self.prompt_field, self.answer_field, self.system, self.match = prompt_field, answer_field, system, match
        self.rows = load_rows(path, rows, dataset, split, prompt_field, answer_field)

    @classmethod
    def tasks(cls, **kwargs: Any) -> Sequence[Mapping[str, Any]]:
        """One `{"row": row}` for each row; `kwargs` are the constructor's."""
        return RowOptions(cls(**kwargs).rows)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """The prompt of `options["row"]`, or of the row number seed modulo the number of rows."""
        super().reset(seed=seed)
        index = self.rng.randrange(len(self.rows)) if seed is None else seed % len(self.rows)
        chosen = {} if options is None else options
        row, place = chosen.get("row", self.rows[index]), "options['row']" if "row" in chosen else f"row {index + 1}"
        check_row(row, place, self.prompt_field, self.answer_field)
        self.action_rng = random.Random(self.rng.getrandbits(64))
        self.row = copy.deepcopy(dict(row))
        if self.match == "numeric" and last_number(str(self.row[self.answer_field])) is None:
            raise EnvError(f"{place}: match = 'numeric' but {self.answer_field!r} has no number: {row!r:.200}")
        prompt = copy.deepcopy(self.row[self.prompt_field])
        if isinstance(prompt, str):
            messages = user(with_media(prompt, self.row, self.media, self.folder))
        else:
            messages = list(prompt)
        if self.system is not None and (not messages or messages[0]["role"] != "system"):
            messages.insert(0, {"role": "system", "content": self.system})
        return messages, self._info()

    def step(self, action: str) -> StepResult:
        """Take the answer; the episode is over."""
        if self.match == "none":
            return StepResult([], 0.0, True, False, self._info())
        answer = str(self.row[self.answer_field])
        if self.match == "exact":
            correct = action.strip().casefold() == answer.strip().casefold()
        else:
            correct = last_number(action) == last_number(answer)
        return StepResult([], float(correct), True, False, self._info() | {"correct": correct})

    def _info(self) -> dict[str, Any]:
        return copy.deepcopy({"answer": self.row.get(self.answer_field), "row": self.row})

    def get_state(self) -> dict[str, Any]:
        """The episode without the data set, which the constructor of the other env loads."""
        return {key: value for key, value in super().get_state().items() if key != "rows"}

    def expert_action(self) -> str:
        """The row's answer."""
        return str(self.row.get(self.answer_field, ""))

    def random_action(self) -> str:
        """The answer of any row."""
        return str(self.action_rng.choice(self.rows).get(self.answer_field, ""))
