"""Pure functions that algorithms are made of. No torch import, no config, no device, no process group.

Masked tokens never reach these functions: the learner selects the trained tokens first (see `TrainedTokens`), so a NaN
at a masked position has no way in. ℓ is a log-prob at the sampling temperature, A an advantage, r = exp(ℓ − ℓ_old);
N counts trained tokens, G the episodes of a group.
"""

from relax_gym_trainers.functional.advantages import group_normalise, leave_one_out, overlong_penalty, whiten
from relax_gym_trainers.functional.aggregation import token_weights
from relax_gym_trainers.functional.corrections import icepop_weight, keeps_sequence, truncated_weight
from relax_gym_trainers.functional.kl import kl_estimate
from relax_gym_trainers.functional.losses import (
    anchored_ratio,
    cispo_loss,
    ppo_clip_loss,
    reinforce_loss,
    sapo_loss,
)

__all__ = [
    "anchored_ratio",
    "cispo_loss",
    "group_normalise",
    "icepop_weight",
    "keeps_sequence",
    "kl_estimate",
    "leave_one_out",
    "overlong_penalty",
    "ppo_clip_loss",
    "reinforce_loss",
    "sapo_loss",
    "token_weights",
    "truncated_weight",
    "whiten",
]
