"""Tic-tac-toe against a seeded opponent."""

from __future__ import annotations

import functools
import random
from typing import Any

from relax_gym import Env, Message, StepResult, user
from relax_gym_envs._text import check_choice

LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
OTHER = {"X": "O", "O": "X"}
REWARDS = {"win": 1.0, "draw": 0.5, "loss": 0.0}
MAX_ILLEGAL = 3


def outcome(board: str) -> str | None:
    """How a finished game went for X; None while it goes on. `board` is nine of "X", "O", " "."""
    for a, b, c in LINES:
        if board[a] != " " and board[a] == board[b] == board[c]:
            return "win" if board[a] == "X" else "loss"
    return None if " " in board else "draw"


def moves(board: str, mark: str) -> dict[str, str]:
    """Each free cell, "1" to "9", and the board after `mark` took it."""
    return {str(cell + 1): board[:cell] + mark + board[cell + 1 :] for cell in range(9) if board[cell] == " "}


@functools.cache
def value(board: str, mark: str) -> int:
    """Minimax value for X when `mark` moves next; an early win (or late loss) is worth more."""
    if (ended := outcome(board)) is not None:
        return {"win": 1, "draw": 0, "loss": -1}[ended] * (1 + board.count(" "))
    return (max if mark == "X" else min)(value(after, OTHER[mark]) for after in moves(board, mark).values())


def best_cells(board: str, mark: str) -> list[str]:
    """All optimal moves."""
    best = value(board, mark)
    return [cell for cell, after in moves(board, mark).items() if value(after, OTHER[mark]) == best]


class TicTacToe(Env):
    """The agent is X and moves first by naming a cell, 1 to 9.

    Args:
        opponent: "random" plays any free cell, "perfect" never loses (choosing among equally good moves by the seed).

    Reward at the end: win 1, draw 0.5, loss 0. Illegal replies are told and repeated; the third one loses the game.
    """

    def __init__(self, opponent: str = "random") -> None:
        check_choice("opponent", opponent, ("random", "perfect"))
        self.opponent = opponent

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """An empty board."""
        super().reset(seed=seed)
        self.board, self.illegal = " " * 9, 0
        self.action_rng = random.Random(self.rng.getrandbits(64))
        return user(f"Tic-tac-toe. You are X, I am O. Reply with the number of a free cell.\n{self._draw()}"), {}

    def step(self, action: str) -> StepResult:
        """X moves, then O."""
        cell, boards = action.strip().removesuffix("."), moves(self.board, "X")
        if cell not in boards:
            self.illegal += 1
            if self.illegal >= MAX_ILLEGAL:
                return StepResult(user("Illegal again. You lose."), 0.0, True, False, {"outcome": "loss"})
            return StepResult(user(f"Illegal. Reply with a free cell.\n{self._draw()}"), 0.0, False, False, {})
        self.board = boards[cell]
        if outcome(self.board) is None:
            replies = moves(self.board, "O")
            cells = list(replies) if self.opponent == "random" else best_cells(self.board, "O")
            self.board = replies[self.rng.choice(cells)]
        if (ended := outcome(self.board)) is None:
            return StepResult(user(self._draw()), 0.0, False, False, {})
        return StepResult(user(f"{self._draw()}\nResult: {ended}."), REWARDS[ended], True, False, {"outcome": ended})

    def _draw(self) -> str:
        cells = [mark if mark != " " else str(index + 1) for index, mark in enumerate(self.board)]
        return "\n".join(" ".join(cells[row : row + 3]) for row in (0, 3, 6))

    def expert_action(self) -> str:
        """A minimax move."""
        return best_cells(self.board, "X")[0]

    def random_action(self) -> str:
        """Any free cell."""
        return self.action_rng.choice(list(moves(self.board, "X")))
