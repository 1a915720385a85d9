"""GSPO-token: the sequence's ratio, each token's own gradient, so that advantages may differ within a sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_gym.algorithm import TrainedTokens
from relax_gym_trainers.algorithms.gspo import GSPO
from relax_gym_trainers.functional import anchored_ratio

if TYPE_CHECKING:
    from torch import Tensor


class GSPOToken(GSPO):
    """GSPO-token (Zheng et al. 2025, arXiv:2507.18071).

    GSPO with s_{i,t} = sg(s_i) · π/sg(π). With one advantage for the whole sample it equals GSPO in loss and gradient.
    """

    def ratio(self, tokens: TrainedTokens) -> Tensor:
        """The value of s_i at each token, with the token's own gradient, [N]."""
        return anchored_ratio(tokens.logprobs, super().ratio(tokens))
