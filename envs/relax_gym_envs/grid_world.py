"""A maze drawn in text."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

from relax_gym import Env, Message, StepResult, user
from relax_gym_envs._text import check_range

Cell = tuple[int, int]
MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


def shortest_path(rows: int, columns: int, walls: frozenset[Cell], start: Cell, goal: Cell) -> list[str] | None:
    """The moves of a shortest path by breadth-first search; None when there is no path."""
    queue: deque[Cell] = deque([start])
    came: dict[Cell, tuple[Cell, str] | None] = {start: None}
    while queue and goal not in came:
        here = queue.popleft()
        for word, (down, right) in MOVES.items():
            there = here[0] + down, here[1] + right
            if there not in came and there not in walls and 0 <= there[0] < rows and 0 <= there[1] < columns:
                came[there] = here, word
                queue.append(there)
    if goal not in came:
        return None
    path: list[str] = []
    step = came[goal]
    while step is not None:
        path.append(step[1])
        step = came[step[0]]
    return path[::-1]


def put_walls(rows: int, columns: int, cells: Sequence[Cell], wanted: int, start: Cell, goal: Cell) -> frozenset[Cell]:
    """The first `wanted` of `cells` as walls, but for those that would close the last way."""
    walls: frozenset[Cell] = frozenset()
    for cell in cells[:wanted]:
        if shortest_path(rows, columns, walls | {cell}, start, goal) is not None:
            walls |= {cell}
    return walls


class GridWorld(Env):
    """Walk from A to G by saying up, down, left or right. Every maze can be solved.

    Args:
        size: cells a side, 2 to 30.
        walls: fraction of the cells that are walls, 0 to 0.6, fewer where a wall would close the last way.
        max_steps: turns the agent has; by default size², which is always enough.

    Reaching G gives 1 and ends the episode; running out of steps gives 0. A bump or another word costs a step.
    """

    def __init__(self, size: int = 5, walls: float = 0.2, max_steps: int | None = None) -> None:
        check_range("size", size, 2, 30)
        check_range("walls", walls, 0.0, 0.6)
        self.size, self.share, self.max_steps = size, walls, size * size if max_steps is None else max_steps
        check_range("max_steps", self.max_steps, 1, 10**6)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """Build a maze: start, goal, then one wall after another as long as a way remains."""
        super().reset(seed=seed)
        cells = [(row, column) for row in range(self.size) for column in range(self.size)]
        self.rng.shuffle(cells)
        self.here, self.goal, *rest = cells
        wanted = int(self.share * len(cells))
        self.walls = put_walls(self.size, self.size, rest, wanted, self.here, self.goal)
        self.action_rng = random.Random(self.rng.getrandbits(64))
        self.left = self.max_steps
        return user(f"Move A to G around the walls (#). Reply with one word: {', '.join(MOVES)}.\n{self._draw()}"), {}

    def step(self, action: str) -> StepResult:
        """Take one move."""
        self.left -= 1
        down, right = MOVES.get(action.strip().lower().removesuffix("."), (0, 0))
        there = self.here[0] + down, self.here[1] + right
        if (down, right) == (0, 0):
            text = f"Reply with one word: {', '.join(MOVES)}.\n"
        elif there in self.walls or min(there) < 0 or max(there) >= self.size:
            text = "You bump into a wall.\n"
        else:
            self.here, text = there, ""
        if self.here == self.goal:
            return StepResult(user("You reached G."), 1.0, True, False, {"correct": True})
        if self.left <= 0:
            return StepResult(user(f"{text}Out of steps."), 0.0, True, False, {"correct": False})
        return StepResult(user(f"{text}{self._draw()}"), 0.0, False, False, {})

    def _draw(self) -> str:
        marks = dict.fromkeys(self.walls, "#") | {self.here: "A", self.goal: "G"}
        rows = (" ".join(marks.get((row, column), ".") for column in range(self.size)) for row in range(self.size))
        return "\n".join(rows) + f"\nSteps left: {self.left}"

    def expert_action(self) -> str:
        """The first move of a shortest path."""
        return (shortest_path(self.size, self.size, self.walls, self.here, self.goal) or ["up"])[0]

    def random_action(self) -> str:
        """Any of the four words."""
        return self.action_rng.choice(list(MOVES))
