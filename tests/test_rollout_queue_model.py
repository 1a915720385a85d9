"""Queue and loop through every order of events, at small sizes: no deadlock, the bound kept, nothing lost."""

import asyncio

import pytest
from queue_model import Size, World, explore

RULES = [("slot", 0), ("ready", 0), ("ready", 1)]


def check(per_step: int, staleness: int, steps: int, rule: tuple[str, int], every: int, limit: int | None) -> None:
    size = Size(
        groups_per_step=per_step,
        max_staleness=staleness,
        last_step=steps,
        order=rule[0],
        oversample=rule[1],
        update_every=every,
        limit=limit,
    )
    worlds, over = asyncio.run(explore(size))
    assert worlds > 10
    assert over > 0


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("limit", [None, 1])
def test_k101_single_groups_neither_wait_for_ever_nor_break_the_bound(
    limit: int | None, staleness: int, rule: tuple[str, int], every: int
) -> None:
    check(1, staleness, 3, rule, every, limit)


@pytest.mark.parametrize("rule", RULES)
def test_k101_pairs_of_groups_on_policy(rule: tuple[str, int]) -> None:
    check(2, 0, 3, rule, 1, None)


def test_a_run_that_goes_on_with_the_groups_it_had_finished_is_another_world_than_one_without() -> None:
    async def after() -> dict[str, World]:
        size = Size(groups_per_step=1, max_staleness=1, last_step=3)
        world = World(size, size.queue(0, []), 0).fork()
        for event in ("admit", "finish 0", "take", "admit", "finish 1", "publish"):
            world = dict(world.futures())[event]
        return dict(world.futures())

    worlds = asyncio.run(after())
    assert worlds["resume"].key != worlds["resume_kept"].key
    assert worlds["resume_kept"].queue.queued == 1


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES[:2])
@pytest.mark.parametrize("staleness", [1, 2])
def test_k101_a_longer_run_of_single_groups(staleness: int, rule: tuple[str, int]) -> None:
    check(1, staleness, 4, rule, 1, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("staleness", "steps", "rule", "every", "limit"),
    [
        (1, 3, ("slot", 0), 1, None),
        (1, 3, ("ready", 0), 1, 2),
        (1, 2, ("ready", 1), 1, 2),
        (2, 2, ("ready", 0), 2, 2),
        (0, 3, ("ready", 1), 2, 2),
    ],
)
def test_k101_pairs_of_groups_ahead_of_the_learner(
    staleness: int, steps: int, rule: tuple[str, int], every: int, limit: int | None
) -> None:
    check(2, staleness, steps, rule, every, limit)
