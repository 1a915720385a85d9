"""Pure functions that algorithms are made of. No torch import, no config, no device, no process group.

Masked tokens never reach these functions: the learner selects the trained tokens first (see `TrainedTokens`), so a NaN
at a masked position has no way in. ℓ is a log-prob at the sampling temperature, A an advantage, r = exp(ℓ − ℓ_old);
N counts trained tokens, G the episodes of a group.
"""

from relax_gym_trainers.functional.advantages import group_normalise, leave_one_out, overlong_penalty, whiten
from relax_gym_trainers.functional.aggregation import token_weights
from relax_gym_trainers.functional.corrections import icepop_weight, keeps_sequence, truncated_weight
from relax_gym_trainers.functional.distillation import (
    append_tail,
    distilled_advantages,
    divergence,
    forward_kl,
    jsd,
    reverse_kl,
    select_with_tail,
)
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
    "append_tail",
    "cispo_loss",
    "distilled_advantages",
    "divergence",
    "forward_kl",
    "group_normalise",
    "icepop_weight",
    "jsd",
    "keeps_sequence",
    "kl_estimate",
    "leave_one_out",
    "overlong_penalty",
    "ppo_clip_loss",
    "reinforce_loss",
    "reverse_kl",
    "sapo_loss",
    "select_with_tail",
    "token_weights",
    "truncated_weight",
    "whiten",
]
