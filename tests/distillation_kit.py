"""A learner that distils, and samples for two teachers."""

from __future__ import annotations

import dataclasses

from learner_cases import context, learner
from transformers import GPT2Config

GPT2 = GPT2Config(vocab_size=61, n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=1)
ENV = "test/None-v0"


def distilling(models, *, temperature=0.7, double=True, options=None, **algorithm):
    algorithm = {"name": "opd", **({} if "teachers" in algorithm else {"teacher": str(models["t1"])}), **algorithm}
    trainer = learner(context(models["student"], temperature=temperature, **algorithm), **(options or {}))
    if double:
        for policy in (
            trainer.policy,
            *(teacher.policy for teacher in trainer.objectives[0].distiller._teachers.values()),
        ):
            policy.model.double()
    return trainer


def routed(samples):
    """Half of the samples are another env's."""
    return [dataclasses.replace(s, env_id="test/Other-v0" if i % 2 else ENV) for i, s in enumerate(samples)]
