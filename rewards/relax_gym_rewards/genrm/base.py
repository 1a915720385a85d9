"""What every judge has: where it is, how it is asked, and what becomes of a question that fails."""

from __future__ import annotations

import asyncio
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from relax_gym.endpoint.client import EndpointConfig, EndpointError
from relax_gym.errors import RewardError
from relax_gym.types import FinishReason, Message, Trajectory
from relax_gym.view import message_text
from relax_gym_rewards.genrm.cache import JudgementCache, digest
from relax_gym_rewards.genrm.lines import ByEndpoint, BySampler
from relax_gym_rewards.genrm.prompt import SYSTEM, Framer
from relax_gym_rewards.genrm.verdict import NoVerdict

T = TypeVar("T")
ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
TAKEN = frozenset({"model", "messages", "seed", "stream", "n", "temperature", "max_tokens"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked: `render` makes the user's message with a mark that none of `texts` holds; `read` reads the reply.

    `facts` is what the answer depends on beside the message.
    """

    texts: Sequence[str]
    render: Callable[[str], str]
    read: Callable[[str, str], Any]
    facts: Mapping[str, Any]


@dataclass(kw_only=True, eq=False)
class Judge:
    """Options of every judge.

    Attributes:
        endpoint: all before `/chat/completions` of an OpenAI-compatible API, e.g. http://localhost:30000/v1.
        sampler: instead of an endpoint, a table as `[sampler]` is, e.g. {name = "sglang"}: the judge serves its model.
        model: the model's name there; of a sampler, a folder or name as in `[model]`, or all of such a table.
        key_env: name of the environment variable that holds the key; "" sends none.
        samples: times that everything is asked; what is said is averaged.
        temperature: at which the judge samples; above 0 with several samples.
        max_tokens: most tokens of a reply, thinking included.
        body: more fields of each request, e.g. {top_p = 0.9}.
        cache: folder that keeps judgements for other runs; "" keeps them in memory only.
        max_chars: most characters of one text of an episode; the middle of a longer one is left out.
        special_tokens: more strings that the judge's tokenizer reads as special tokens.
        system_role: false for models without a system message.
        concurrency: most requests at once.
        timeout, deadline, retries: seconds of one try, seconds of a request with all its tries, most tries more.
    """

    endpoint: str = ""
    sampler: Mapping[str, Any] = field(default_factory=dict)
    model: str | Mapping[str, Any]
    key_env: str = ""
    samples: int = 1
    temperature: float = 0.0
    max_tokens: int = 2048
    body: Mapping[str, Any] = field(default_factory=dict)
    cache: str = ""
    max_chars: int = 20_000
    special_tokens: Sequence[str] = ()
    system_role: bool = True
    concurrency: int = 32
    timeout: float = 120.0
    deadline: float = 300.0
    retries: int = 4

    def __post_init__(self) -> None:
        self._check()
        self._lines = self._line()
        self._cache = JudgementCache(self.cache)
        self.framer = Framer(limit=self.max_chars, special=tuple(self.special_tokens))
        self._counts: Counter[str] = Counter()
        self._spreads: list[float] = []

    def preflight(self) -> None:
        """Load the model, if it is served here: no episode shall pay for that."""
        self._lines.start()

    def close(self) -> None:
        """Free the model, if it is served here."""
        self._lines.close()

    def metrics(self) -> dict[str, float]:
        """Since the last call: judgements made and found in the cache, those that failed, replies without a verdict,
        and `disagreement`, the mean standard deviation of the samples of a judgement."""
        counts, self._counts = self._counts, Counter()
        spreads, self._spreads = self._spreads, []
        found = {name: float(counts[name]) for name in ("judged", "cached", "failed", "no_verdict")}
        return found | ({"disagreement": statistics.fmean(spreads)} if spreads else {})

    async def ask(self, question: Question) -> list[Any]:
        """What the samples said, those without a verdict left out; from the cache if it has been asked before.

        Raises:
            RewardError: half of them or more have no verdict; says why the first has none.
        """
        key = digest(
            {
                "messages": self._messages(question.render("MARK"), "MARK"),
                "endpoint": self.endpoint.rstrip("/") or dict(self.sampler),
                "body": {**self.body, "model": self.model, "temperature": self.temperature, "most": self.max_tokens},
                "samples": self.samples,
                **question.facts,
            }
        )
        if (kept := self._cache.get(key)) is not None:
            self._counts["cached"] += 1
            return list(kept)
        answers = await asyncio.gather(*(self._sample(question, number) for number in range(self.samples)))
        said = [answer for answer in answers if not isinstance(answer, Exception)]
        if 2 * len(said) <= self.samples:
            self._counts["failed"] += 1
            faults = [answer for answer in answers if isinstance(answer, Exception)]
            raise RewardError(f"genrm: {len(faults)} of {self.samples} samples without a verdict: {faults[0]}")
        self._counts["judged"] += 1
        values = [value for value, _ in said]
        if len(said) == self.samples:
            self._cache.put(key, values, [reply for _, reply in said])
        return values

    def note_spread(self, values: Sequence[float]) -> None:
        """How far the samples of one judgement are apart, for `metrics`."""
        if len(values) > 1:
            self._spreads.append(statistics.pstdev(values))

    async def _sample(self, question: Question, number: int) -> tuple[Any, str] | NoVerdict | EndpointError:
        mark = self.framer.mark(question.texts)
        messages = self._messages(question.render(mark), mark)
        try:
            async with self._lines.lent() as endpoint:
                reply = await endpoint.complete(messages, seed=number)
            try:
                return question.read(reply.content, mark), reply.content
            except NoVerdict as fault:
                self._counts["no_verdict"] += 1
                if reply.finish_reason is FinishReason.LENGTH:
                    return NoVerdict(f"{fault} (cut at max_tokens = {self.max_tokens})")
                return fault
        except EndpointError as error:
            return error

    def _messages(self, text: str, mark: str) -> list[Message]:
        system = SYSTEM.format(mark=mark)
        if not self.system_role:
            return [{"role": "user", "content": f"{system}\n\n{text}"}]
        return [{"role": "system", "content": system}, {"role": "user", "content": text}]

    def _line(self) -> ByEndpoint | BySampler:
        body = {**self.body, "temperature": self.temperature, "max_tokens": self.max_tokens}
        if self.sampler:
            return BySampler(self.model, self.sampler, body, most=self.concurrency, deadline=self.deadline)
        config = EndpointConfig(
            url=self.endpoint,
            model=str(self.model),
            key_env=self.key_env or None,
            timeout=self.timeout,
            deadline=self.deadline,
            retries=self.retries,
            body=body,
            command_line=False,
        )
        return ByEndpoint(config, self.concurrency)

    def _check(self) -> None:
        if bool(self.endpoint) == bool(self.sampler) or (self.endpoint and not isinstance(self.model, str)):
            raise RewardError(
                "genrm: give an endpoint with the name of a model there, or a sampler and a model as in a config: "
                'sampler = { name = "local" }'
            )
        limits = {name: getattr(self, name) for name in ("samples", "max_tokens", "max_chars", "concurrency")}
        if wrong := [f"{name} = {value}" for name, value in limits.items() if not value >= 1]:
            raise RewardError(f"genrm: {', '.join(wrong)}; it must be at least 1")
        if not (0 <= self.temperature < math.inf and min(self.timeout, self.deadline) > 0 and self.retries >= 0):
            raise RewardError("genrm: temperature and retries must be 0 or more, timeout and deadline above 0")
        if self.samples > 1 and not self.temperature:
            raise RewardError(f"genrm: samples = {self.samples} at temperature 0 say the same; set temperature above 0")
        if self.key_env and not ENVIRONMENT_NAME.fullmatch(self.key_env):  # it may be the key, so it is not shown
            raise RewardError("genrm: key_env is no name of an environment variable; put the key into one and name it")
        if taken := sorted(TAKEN & self.body.keys()):
            raise RewardError(f"genrm: body has {taken[0]!r}, which has an option of its own; leave it out of body")


def first_question(trajectory: Trajectory) -> str:
    """What the env said before the model's first turn, system message included."""
    return "\n\n".join(map(message_text, trajectory.turns[0].observation)) if trajectory.turns else ""


def facts_of(rule: Any, framer: Framer) -> dict[str, Any]:
    """What a verdict depends on beside the message."""
    return {"rule": asdict(rule), "special": list(framer.special)}
