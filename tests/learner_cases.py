"""Tiny models, contexts, samples and the plain definitions that the torch learner is tested against."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast, Qwen3Config

from relax_gym.config import RunConfig
from relax_gym.context import RunContext
from relax_gym.types import Batch, StopReason, TrainingSample
from relax_gym_trainers.torch_learner.learner import TorchLearner
from relax_gym_trainers.torch_learner.options import TorchLearnerOptions
from relax_gym_trainers.torch_learner.update import Tally, accumulate_policy_gradient, plan

VOCABULARY = 61
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}


def qwen3(**changes: Any) -> Qwen3Config:
    return Qwen3Config(**{**SMALL, "head_dim": 16, "tie_word_embeddings": True, **changes})


def save_model(folder: Path, config: PreTrainedConfig, seed: int = 0) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def context(model: Path, *, temperature: float = 1.0, groups: int = 2, steps: int = 10, **algorithm: Any) -> RunContext:
    vocabulary = {f"t{i}": i for i in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0")))
    config = RunConfig.model_validate(
        {
            "model": {"name": str(model)},
            "env": [{"id": "test/None-v0"}],
            "rollout": {"temperature": temperature},
            "algorithm": {"name": "grpo", **algorithm},
            "train": {"steps": steps, "groups_per_step": groups, "group_size": 2},
        }
    )
    return RunContext(config=config, run_dir=model, model_path=model, tokenizer=tokenizer)


def learner(run: RunContext, **options: Any) -> TorchLearner:
    return TorchLearner(run, TorchLearnerOptions(**{"dtype": "float32", "device": "cpu", "lr": 1e-2, **options}))


def sample(
    ids: Sequence[int],
    mask: Sequence[int],
    *,
    advantage: float = 1.0,
    logprobs: Sequence[float] | None = None,
    group: str = "g0",
    episode: str = "e0",
) -> TrainingSample:
    """A sample whose masked tokens all have one advantage; log-probs -1 unless given."""
    on = np.array(mask, dtype=np.int8)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], on, [0]])))
    spans = tuple((int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True))
    return TrainingSample(
        episode_id=episode,
        group_id=group,
        env_id="test/None-v0",
        segment=0,
        token_ids=np.array(ids, dtype=np.int32),
        loss_mask=on,
        logprobs=np.array(logprobs if logprobs is not None else -1.0 * on, dtype=np.float32),
        versions=np.where(on == 1, 0, -1).astype(np.int32),
        advantages=np.where(on == 1, advantage, 0.0).astype(np.float32),
        turn_spans=spans,
        turn_rewards=(0.0,) * len(spans),
        reward=0.0,
        stop_reason=StopReason.ENV_DONE,
    )


def random_batch(seed: int = 0, *, groups: int = 2, size: int = 3, version: int = 0) -> Batch:
    """Multi-turn samples of unequal lengths; each group has one prompt."""
    rng = np.random.default_rng(seed)
    samples = []
    for group in range(groups):
        prompt = rng.integers(2, VOCABULARY, 4 + 3 * group)
        for index in range(size):
            answer, reply, last = 2 + index, 1 + (index + group) % 3, 1 + index
            rest = rng.integers(2, VOCABULARY, answer + reply + last)
            mask = [0] * len(prompt) + [1] * answer + [0] * reply + [1] * last + [0]
            ids = [*prompt.tolist(), *rest.tolist(), 1]
            logprobs = np.where(np.array(mask) == 1, -4.0 - 0.3 * rng.random(len(mask)), 0.0)
            advantage = (-1.0) ** index * (0.5 + 0.25 * index)
            samples.append(
                sample(
                    ids, mask, advantage=advantage, logprobs=logprobs, group=f"g{group}", episode=f"g{group}e{index}"
                )
            )
    return Batch(version=version, samples=samples)


def plain_logprobs(model, samples, temperature=1.0):
    """Per sample: log-prob and entropy of the trained tokens, by one full forward of the whole sample."""
    out = []
    for s in samples:
        ids = torch.from_numpy(s.token_ids.astype(np.int64))[None]
        logits = model(input_ids=ids).logits[0, :-1] / temperature
        log_p = logits.log_softmax(-1)
        mask = torch.from_numpy(s.loss_mask[1:] == 1)
        logprobs = log_p.gather(-1, ids[0, 1:, None])[:, 0]
        out.append((logprobs[mask], -(log_p.exp() * log_p).sum(-1)[mask]))
    return out


def flat(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def weights(trainer):
    return {name: tensor.to("cpu", copy=True) for name, tensor in trainer.weights()}


def gradient(trainer, batch, *, old=None, reference=None, budget=10_000, share=True, skip=True):
    part = plan(batch.samples, budget=budget, share_prefix=share, skip_flat=skip)
    if old == "rollout":
        old = [torch.from_numpy(b.logprobs) for b in part.micro_batches]
    trainer.optimizer.zero_grad()
    loss = accumulate_policy_gradient(
        trainer.policy,
        trainer.objectives[0].algorithm,
        part,
        old=old,
        reference=reference,
        tally=Tally(),
        first=True,
        step=1,
    )
    return loss, flat(trainer.policy.model), part


def without_seconds(metrics):
    return {name: value for name, value in metrics.items() if name != "seconds"}


class Largest(TorchDispatchMode):
    """Notes how large a tensor any operation makes, in elements, and how many tensors and bytes there are at a time."""

    def __init__(self):
        super().__init__()
        self.elements = self.held = self.bytes = 0
        self._alive = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [t for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, torch.Tensor)]
        self.elements = max([self.elements, *(tensor.numel() for tensor in made)])
        self._alive.update(dict.fromkeys(made))
        self.held = max(self.held, len(self._alive))
        storages = {storage.data_ptr(): storage.nbytes() for storage in (t.untyped_storage() for t in self._alive)}
        self.bytes = max(self.bytes, sum(storages.values()))
        return out
