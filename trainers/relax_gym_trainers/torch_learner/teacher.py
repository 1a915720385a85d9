"""A teacher that is a frozen model in the learner's process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_gym.config import MediaConfig
from relax_gym.errors import ModelError
from relax_gym.models import load_tokenizer
from relax_gym.processing import MediaProcessor
from relax_gym.teacher import Teacher, TeacherScores
from relax_gym.types import TrainingSample
from relax_gym_trainers.device import upload
from relax_gym_trainers.torch_learner import model as models
from relax_gym_trainers.torch_learner.logprobs import blocks, cut, fill, slices
from relax_gym_trainers.torch_learner.packing import MicroBatch, pack
from relax_gym_trainers.torch_learner.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSettings:
    """How a frozen model computes: `chunk` tokens at a time have logits, one forward pass has at most `budget`."""

    temperature: float
    device: torch.device
    dtype: torch.dtype
    chunk: int
    budget: int
    share_prefix: bool
    trust_remote_code: bool
    media: MediaConfig
    never_sampled: tuple[int, ...] = ()


class FrozenTeacher(Teacher):
    """A causal LM that is never trained, its weights in the precision of the learner's arithmetic."""

    def __init__(self, policy: Policy, *, budget: int) -> None:
        """`policy` scores at one temperature; `budget` is the most tokens of one forward pass of `score`."""
        self.policy = policy
        self._budget = budget

    @torch.no_grad()
    def features(self, batch: MicroBatch) -> Tensor:
        """`Policy.features` of the trained tokens, [N, H]. The experts that the sampler chose are not the teacher's."""
        with self.policy.autocast():
            return self.policy.features(dataclasses.replace(batch, experts=None))

    def score(self, samples: Sequence[TrainingSample], *, temperature: float, top_k: int) -> list[TeacherScores]:
        """See `Teacher.score`. Raises ModelError at another temperature than it was built for."""
        if temperature != self.policy.temperature:
            raise ModelError(f"this teacher scores at temperature {self.policy.temperature}, not at {temperature}")
        found: dict[TrainingSample, TeacherScores] = {}
        share, cost = self.policy.share_prefix, self.policy.pair_cost
        for batch in pack(samples, budget=self._budget, share_prefix=share, pair_cost=cost):
            ends = np.cumsum(batch.token_counts)[:-1]
            logprobs, ids, top = (np.split(values, ends) for values in self._score_batch(batch, top_k))
            for member, *row in zip(batch.members, logprobs, ids, top, strict=True):
                found[member] = _scores(*row)
        nothing = np.zeros((0, top_k), dtype=np.float32)
        return [found.get(s) or _scores(nothing.sum(1), nothing.astype(np.int64), nothing) for s in samples]

    @torch.no_grad()
    def _score_batch(self, batch: MicroBatch, top_k: int) -> list[NDArray[Any]]:
        """Log-prob of each target, [N], and ids and log-probs of the likeliest tokens, [N, K] each."""
        policy = self.policy
        features = self.features(batch)
        targets = upload(batch.targets, features.device)
        count, exact = len(features), torch.promote_types(features.dtype, torch.float32)
        values = features.new_empty(count, 1 + top_k, dtype=exact)
        found = [values[:, 0], targets.new_empty(count, top_k), values[:, 1:]]
        for rows in slices(len(features), policy.chunk):
            raw = None  # lets go of one chunk's logits before the next one's are there
            raw = policy.raw_logits(features[rows])
            for part in blocks(raw):
                log_q = policy.logits(raw[part]).log_softmax(-1)
                top, ids = log_q.topk(top_k)
                fill(cut(found, rows), part, (log_q.gather(-1, targets[rows][part][:, None])[:, 0], ids, top))
        return [column.cpu().numpy() for column in found]

    def close(self) -> None:
        """Drop the weights."""
        self.policy.model.to("meta")  # type: ignore[arg-type]


def load_teacher(
    folder: Path, *, tokenizer: PreTrainedTokenizerBase, rows: int, settings: TeacherSettings
) -> FrozenTeacher:
    """The model of a folder. `tokenizer` is the student's, `rows` the number of ids that the student has logits for.

    Raises:
        ModelError: it cannot be loaded, or speaks another vocabulary than the student.
    """
    trust = settings.trust_remote_code
    surplus = check_teacher(folder, tokenizer=tokenizer, rows=rows, trust_remote_code=trust)
    model = models.load_model(folder, trust_remote_code=trust).requires_grad_(False)
    if surplus:
        model.resize_token_embeddings(rows)
    policy = Policy(
        model,
        temperature=settings.temperature,
        dtype=settings.dtype,
        chunk=settings.chunk,
        share_prefix=settings.share_prefix,
        processor=MediaProcessor.load(folder, settings.media, trust_remote_code=trust),
        never_sampled=settings.never_sampled,
    )
    # Only now: the probes of Policy tell two ways to compute the same thing apart in float32.
    for parameter in model.parameters():
        # Buffers keep their precision: rotary frequencies in bfloat16 would turn far positions by wrong angles.
        parameter.data = parameter.data.to(settings.dtype)
    model.to(settings.device)  # type: ignore[arg-type]
    return FrozenTeacher(policy, budget=settings.budget)


def check_teacher(
    folder: Path, *, tokenizer: PreTrainedTokenizerBase, rows: int, trust_remote_code: bool = False
) -> int:
    """See `surplus_rows`, and `load_teacher` for the arguments.

    Raises:
        ModelError: `load_teacher` would not take the model, whose weights are not read.
    """
    check_tokenizer(folder, tokenizer, load_tokenizer(folder, trust_remote_code=trust_remote_code))
    settings = models.load_settings(folder, trust_remote_code=trust_remote_code)
    return surplus_rows(folder, settings, rows=rows, used=len(tokenizer))


def check_tokenizer(folder: Path, student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> None:
    """Raises ModelError unless both give every token the same id."""
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    if ours == theirs:
        return
    differing = sorted((t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t)), key=str)
    examples = ", ".join(f"{t!r} is {ours.get(t)} here and {theirs.get(t)} there" for t in differing[:3])
    raise ModelError(
        f"teacher {folder} has another tokenizer than the model: {len(theirs)} tokens instead of {len(ours)}, "
        f"{len(differing)} with another id ({examples}); a teacher scores the policy's token ids, so it must come from "
        "a family with the same vocabulary"
    )


def vocabulary_rows(config: PreTrainedConfig) -> int:
    """How many ids a model of this config has logits for."""
    rows: int = config.get_text_config().vocab_size
    return rows


def surplus_rows(folder: Path, config: PreTrainedConfig, *, rows: int, used: int) -> int:
    """How many ids a teacher has logits for beyond the student's `rows`; they stand for no token.

    Raises:
        ModelError: it has fewer, or some of them are tokens: the tokenizer has `used`.
    """
    own = vocabulary_rows(config)
    if own != rows and not own > rows >= used:
        raise ModelError(
            f"teacher {folder} has logits for {own} ids, the model for {rows}; a teacher needs as "
            f"many, or more if those beyond {rows} are no tokens (the tokenizer has {used})"
        )
    return own - rows


def _scores(logprobs: NDArray[Any], ids: NDArray[Any], top: NDArray[Any]) -> TeacherScores:
    if not top.shape[1]:
        return TeacherScores(logprobs=logprobs)
    return TeacherScores(logprobs=logprobs, top_ids=ids, top_logprobs=top)
