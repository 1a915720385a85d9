"""Importing this module makes every registered env known to Gymnasium, which itself loads no plugins.

Either import it once and call `gymnasium.make("relax_gym/GuessNumber-v0")`, or let Gymnasium import it:
`gymnasium.make("relax_gym.gymnasium_envs:relax_gym/GuessNumber-v0")`.
"""

from relax_gym.registry import register_with_gymnasium

register_with_gymnasium()
