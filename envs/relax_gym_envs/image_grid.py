"""A grid that is seen, not told: every turn shows the picture anew."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_gym import Env, Message, StepResult, user
from relax_gym_envs._quiz import option_named
from relax_gym_envs._text import check_choice, check_range
from relax_gym_envs.grid_world import MOVES, Cell, put_walls, shortest_path

FLOOR, WALL, OUTSIDE, AGENT, GOAL = (0, 0, 0), (120, 120, 120), (60, 60, 60), (230, 30, 30), (30, 200, 30)


class ImageGrid(Env):
    """Move the red square to the green one. Only the picture tells where they are.

    Args:
        width, height: cells of the grid, 1 to 32 each, at least 2 together with a goal elsewhere.
        cell: pixels a side of one cell, 4 to 64. The picture is a square of the longer side; what is outside the grid
            is grey.
        walls: fraction of the cells that are walls (light grey), 0 to 0.6, fewer where a wall would close the last way.
        max_steps: moves there are; by default twice width plus height.
        invalid_reward: reward of a reply that names no direction, which ends the episode.
        style: "plain" asks in sentences, and the last direction a reply names counts; "terse" asks in a word and takes
            a direction only, exactly.
        shuffle_media: show where the squares are in another episode: what is still learned then is not learned from
            the picture.

    Reaching the goal gives 1 and ends the episode; running out of moves gives 0.
    """

    def __init__(
        self,
        width: int = 4,
        height: int = 4,
        cell: int = 8,
        walls: float = 0.0,
        max_steps: int | None = None,
        invalid_reward: float = -0.2,
        style: str = "plain",
        shuffle_media: bool = False,
    ) -> None:
        check_range("width", width, 1, 32)
        check_range("height", height, 1 if width > 1 else 2, 32)
        check_range("cell", cell, 4, 64)
        check_range("walls", walls, 0.0, 0.6)
        check_choice("style", style, ("plain", "terse"))
        self.width, self.height, self.cell, self.share = width, height, cell, walls
        self.max_steps = 2 * (width + height) if max_steps is None else max_steps
        check_range("max_steps", self.max_steps, 1, 10**6)
        self.invalid_reward, self.style, self.shuffle_media = float(invalid_reward), style, shuffle_media

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """Put agent, goal and walls somewhere."""
        super().reset(seed=seed)
        cells = [(row, column) for row in range(self.height) for column in range(self.width)]
        self.rng.shuffle(cells)
        self.here, self.goal, *rest = cells
        wanted = int(self.share * len(cells))
        self.walls = put_walls(self.height, self.width, rest, wanted, self.here, self.goal)
        self.action_rng = random.Random(self.rng.getrandbits(64))
        self.left = self.max_steps
        words = f"Move the red square to the green one. Reply with one word: {', '.join(MOVES)}."
        return self._look("go" if self.style == "terse" else words), {}

    def step(self, action: str) -> StepResult:
        """Take one move."""
        self.left -= 1
        terse = self.style == "terse"
        word = (action if action in MOVES else None) if terse else option_named(action, tuple(MOVES))
        if word is None:
            text = [] if terse else user(f"That is none of {', '.join(MOVES)}.")
            return StepResult(text, self.invalid_reward, True, False, {"correct": False})
        there = self.here[0] + MOVES[word][0], self.here[1] + MOVES[word][1]
        bump = there in self.walls or not (0 <= there[0] < self.height and 0 <= there[1] < self.width)
        self.here = self.here if bump else there
        if self.here == self.goal:
            return StepResult([] if terse else user("You are there."), 1.0, True, False, {"correct": True})
        if self.left <= 0:
            return StepResult([] if terse else user("No moves are left."), 0.0, True, False, {"correct": False})
        return StepResult(self._look("go" if terse else "Bump!" if bump else "And now?"), 0.0, False, False, {})

    def _look(self, text: str) -> list[Message]:
        here, goal = self.here, self.goal
        if self.shuffle_media:
            free = [(r, c) for r in range(self.height) for c in range(self.width) if (r, c) not in self.walls]
            here, goal = self.rng.sample(free, 2)
        picture = {"type": "image", "image": self._draw(here, goal)}
        return user([picture, {"type": "text", "text": text}])

    def _draw(self, here: Cell, goal: Cell) -> NDArray[np.uint8]:
        """The picture, [side, side, 3]."""
        side = max(self.width, self.height)
        cells = np.full((side, side, 3), OUTSIDE, dtype=np.uint8)
        cells[: self.height, : self.width] = FLOOR
        for cell in self.walls:
            cells[cell] = WALL
        cells[goal], cells[here] = GOAL, AGENT
        return cells.repeat(self.cell, axis=0).repeat(self.cell, axis=1)

    def expert_action(self) -> str:
        """The first move of a shortest way."""
        path = shortest_path(self.height, self.width, self.walls, self.here, self.goal)
        assert path, "the goal can always be reached"
        return path[0]

    def random_action(self) -> str:
        """Any direction."""
        return self.action_rng.choice(list(MOVES))
