"""RLOO: REINFORCE against the mean reward of the group's other episodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_gym.algorithm import Algorithm, FloatArray, TrainedTokens
from relax_gym.errors import ConfigError
from relax_gym_trainers.functional import leave_one_out, reinforce_loss

if TYPE_CHECKING:
    from torch import Tensor

    from relax_gym.config import RunConfig


class RLOO(Algorithm):
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740).

    A_i = R_i − mean of the others = G/(G − 1) (R_i − mean R); L = −Aℓ; mean over all tokens. No ratio corrects for
    stale samples or for several updates on one batch, so runs that have them are refused or need a correction.
    """

    def check_run(self, config: RunConfig) -> None:
        """Refuse what would train on stale tokens as if they were the policy's own."""
        train = config.train
        if not train.on_policy and self.correction == "none":
            raise ConfigError(
                f"algorithm 'rloo' has no ratio, so train.max_staleness = {train.max_staleness} with update_every = "
                f"{train.update_every} would train on stale tokens as if they were on-policy; set algorithm.correction "
                "= 'tis' with old_logprobs = 'recompute', or max_staleness = 0 and update_every = 1"
            )
        for key in ("epochs", "updates_per_step"):
            if config.learner.options.get(key, 1) != 1:
                raise ConfigError(f"algorithm 'rloo' has no ratio, so learner.{key} must be 1; another one has a ratio")
        super().check_run(config)

    def advantages(self, rewards: FloatArray) -> FloatArray:
        """Reward minus the mean of the others, [G] → [G]."""
        return leave_one_out(rewards)

    def token_loss(self, tokens: TrainedTokens) -> Tensor:
        """REINFORCE, [N]."""
        return reinforce_loss(tokens.logprobs, tokens.advantages)
