"""Groups → samples with advantages: per episode, per turn, over the batch, with KL; and which groups are dropped."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from algorithm_cases import NAMES, build, episode, group, turn

from relax_gym import credit
from relax_gym.credit import batch_drop_reasons, drop_reason, subtract_kl
from relax_gym.errors import TrainingError
from relax_gym.types import Group


def assign_credit(groups: Any, algorithm: Any) -> Any:
    return credit.assign_credit(groups, (algorithm,))


def of(*trajectories, id="g"):
    return Group(group_id=id, slot=0, trajectories=trajectories)


def advantages(samples):
    return [sample.advantages[sample.loss_mask == 1].tolist() for sample in samples]


def approx(values):
    return [pytest.approx(part, abs=1e-6) for part in values]


# ---- per episode ---------------------------------------------------------------------------------


def test_an_episodes_advantage_stands_at_each_of_its_trained_tokens_in_every_segment():
    good = episode("a", [turn([1, 2], [3, 4], reward=1.0), turn([5], [6], new=True)])
    bad = episode("b", [turn([1, 2], [7])])
    samples = assign_credit([of(good, bad)], build("grpo", scale="none"))
    assert [sample.advantages.tolist() for sample in samples] == [[0, 0, 0.5, 0.5], [0, 0.5], [0, 0, -0.5]]


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"sft"}))
def test_k74_an_unscored_episode_gets_0_and_does_not_move_the_others(name):
    algorithm = build(name)
    whole = assign_credit([group([1.0, None, 0.0, 0.0])], algorithm)
    without = assign_credit([group([1.0, 0.0, 0.0])], algorithm)
    assert advantages(whole)[1] == [0.0]
    assert advantages(whole)[:1] + advantages(whole)[2:] == advantages(without)


def test_sft_trains_on_nothing_but_the_episodes_kept():
    played = group([1.0, None, 0.0, 1.0], lengths=[2, 3, 5, 1])
    samples = assign_credit([played, group([0.0, 0.5], id="h")], build("sft", min_reward=0.8))
    assert [sample.episode_id for sample in samples] == ["g-0", "g-3"]
    assert advantages(samples) == [[1.0, 1.0], [1.0]]
    assert sum(sample.trained_tokens for sample in samples) == 3


def test_no_groups_give_no_samples_and_an_unscored_batch_gives_zeros():
    assert assign_credit([], build("reinforce_pp")) == []
    assert advantages(assign_credit([group([None, None])], build("reinforce_pp"))) == [[0.0], [0.0]]


# ---- per turn ------------------------------------------------------------------------------------


TURNS = [turn([1], [2, 3], reward=1.0), turn([4], [5], reward=0.0), turn([6], [7, 8], reward=2.0)]


def test_a_turn_gets_its_discounted_reward_to_go_normalised_over_all_turns_of_the_group():
    one, two = episode("a", TURNS), episode("b", [turn([1], [9], reward=4.0)])
    algorithm = build("grpo", credit="turn", discount=0.5, scale="none")
    # To go: 1 + 0.5 · (0 + 0.5 · 2) = 1.5, then 1, then 2; the other episode's only turn 4. Their mean is 2.125.
    got = advantages(assign_credit([of(one, two)], algorithm))
    assert got == [[-0.625, -0.625, -1.125, -0.125, -0.125], [1.875]]


def test_turn_credit_adds_what_rewards_give_turn_by_turn_to_what_the_env_gave():
    one, two = episode("a", TURNS, reward=9.0), episode("b", TURNS, reward=3.0)
    one = dataclasses.replace(one, reward_turns={"steps": (1.0, 0.0, 4.0)})
    got = advantages(assign_credit([of(one, two)], build("grpo", credit="turn", scale="none")))
    # rewards per turn: a 2, 0, 6 and 1 that came with the episode; b 1, 0, 2: to go 9, 7, 7 and 3, 2, 2; mean 5
    assert got == approx([[4, 4, 2, 2, 2], [-2, -2, -3, -3, -3]])


def test_turn_credit_divides_by_the_deviation_over_turns():
    one, two = episode("a", TURNS), episode("b", [turn([1], [9], reward=4.0)])
    got = advantages(assign_credit([of(one, two)], build("grpo", credit="turn")))
    # To go: 3, 2, 2 and 4; mean 2.75, unbiased deviation 0.957427.
    assert got == approx([[0.261116, 0.261116, -0.783349, -0.783349, -0.783349], [1.305582]])


def test_turn_credit_follows_the_turns_into_their_segments_and_skips_empty_answers():
    segments = [turn([1], [2], reward=1.0), turn([3], [], reward=5.0), turn([9, 9], [4, 5], reward=2.0, new=True)]
    samples = assign_credit(
        [of(episode("a", segments), episode("b", [turn([1], [7], reward=0.0)]))],
        build("reinforce_pp", credit="turn", kl_reward_coef=1.0),
    )
    assert [sample.advantages.tolist() for sample in samples] == [[0, 8, 0], [0, 0, 2, 2], [0, 0]]


def test_other_rewards_come_with_the_last_turn_so_that_the_sum_is_the_episodes_reward():
    one = episode("a", [turn([1], [2], reward=1.0), turn([3], [4], reward=None)], env=1.0, brief=-0.5)
    algorithm = build("reinforce_pp", credit="turn", kl_reward_coef=1.0)
    assert advantages(assign_credit([of(one)], algorithm)) == [[0.5, -0.5]]


def test_k74_turns_of_an_unscored_episode_get_0():
    lost = episode("a", TURNS, env=None)
    two, three = episode("b", [turn([1], [9], reward=4.0)]), episode("c", [turn([1], [9], reward=2.0)])
    got = advantages(assign_credit([of(lost, two, three)], build("grpo", credit="turn", scale="none")))
    assert got == [[0.0] * 5, [1.0], [-1.0]]


# ---- over the batch ------------------------------------------------------------------------------


def test_reinforce_pp_whitens_over_all_trained_tokens():
    samples = assign_credit([group([1.0, 0.0], lengths=[2, 1])], build("reinforce_pp"))
    # Tokens 1, 1, 0: mean 2/3, unbiased deviation 0.577350.
    assert advantages(samples) == approx([[0.577350, 0.577350], [-1.154701]])


def test_reinforce_pp_baseline_centres_each_group_first():
    first, second = group([1.0, 0.0], id="x"), group([11.0, 9.0], id="y")
    # Centred: 0.5, -0.5, 1, -1; mean 0, unbiased deviation 0.912871.
    got = advantages(assign_credit([first, second], build("reinforce_pp_baseline")))
    assert got == approx([[0.547723], [-0.547723], [1.095445], [-1.095445]])


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_k25_the_order_of_groups_changes_no_statistic(name):
    rng = np.random.default_rng(0)
    groups = [group(rng.normal(size=3).tolist(), lengths=[1, 2, 3], id=f"g{i}") for i in range(4)]
    forward = {s.episode_id: s.advantages for s in assign_credit(groups, build(name))}
    backward = {s.episode_id: s.advantages for s in assign_credit(groups[::-1], build(name))}
    for id, values in forward.items():
        np.testing.assert_allclose(values, backward[id], rtol=1e-6)


def test_a_tiny_reward_difference_far_from_zero_is_whitened_before_it_is_rounded_to_float32():
    got = advantages(assign_credit([group([1000.0, 1000.0 + 1e-6])], build("reinforce_pp")))
    assert got == [pytest.approx([-0.7071], abs=1e-3), pytest.approx([0.7071], abs=1e-3)]


@pytest.mark.parametrize("kl", [0.0, 1e-7])
def test_what_a_kl_leaves_of_a_tiny_difference_far_from_zero_is_whitened_in_float64(kl):
    algorithm = build("reinforce_pp", kl_reward_coef=1.0)
    samples = assign_credit([group([1000.0, 1000.0 + 1e-6])], algorithm)
    final = subtract_kl(samples, [np.array([kl]), np.array([kl])], algorithm)
    assert [sample.advantages.dtype for sample in samples] == [np.float64] * 2
    assert [sample.advantages.dtype for sample in final] == [np.float32] * 2
    assert advantages(final) == [pytest.approx([-0.7071], abs=1e-3), pytest.approx([0.7071], abs=1e-3)]


# ---- KL in the reward ----------------------------------------------------------------------------


def test_kl_is_subtracted_as_what_is_still_to_come_over_segments_too():
    long = episode("a", [turn([1], [2, 3], reward=1.0), turn([5], [6], new=True)])
    short = episode("b", [turn([1], [7])])
    algorithm = build("grpo", scale="none", kl_reward_coef=0.5)
    samples = assign_credit([of(long, short)], algorithm)
    got = subtract_kl(samples, [np.array([0.2, -0.4]), np.array([1.0]), np.array([0.6])], algorithm)
    # To go: 0.8, 0.6, 1.0 in the long episode, 0.6 in the short one; the advantages were ±0.5.
    assert advantages(got) == approx([[0.1, 0.2], [0.0], [-0.8]])


def test_reinforce_pp_whitens_after_the_kl():
    algorithm = build("reinforce_pp", kl_reward_coef=1.0)
    samples = assign_credit([group([1.0, 0.0])], algorithm)
    assert advantages(samples) == [[1.0], [0.0]]
    got = subtract_kl(samples, [np.array([3.0]), np.array([0.0])], algorithm)
    assert advantages(got) == approx([[-0.707107], [0.707107]])


def test_k74_an_unscored_episode_gets_no_kl_either():
    algorithm = build("reinforce_pp", kl_reward_coef=1.0)
    samples = assign_credit([group([1.0, None, 0.0])], algorithm)
    got = subtract_kl(samples, [np.array([0.0]), np.array([99.0]), np.array([0.0])], algorithm)
    assert advantages(got) == approx([[0.707107], [0.0], [-0.707107]])


def test_k18_values_at_masked_positions_do_not_reach_the_returns():
    algorithm = build("reinforce_pp", kl_reward_coef=1.0)
    samples = assign_credit([group([1.0, 0.0])], algorithm)
    poisoned = [
        dataclasses.replace(s, advantages=np.where(s.loss_mask == 1, s.advantages, np.float32(math.nan)))
        for s in samples
    ]
    kl = [np.array([0.3]), np.array([0.1])]
    assert advantages(subtract_kl(poisoned, kl, algorithm)) == advantages(subtract_kl(samples, kl, algorithm))


# ---- filters -------------------------------------------------------------------------------------


def lucky(played: Group) -> str | None:
    return "unlucky" if len(played.trajectories) == 3 else None


def broken(played: Group) -> bool:
    return True


@pytest.mark.parametrize(
    ("options", "rewards", "expected"),
    [
        ({}, [None, None], "unscored"),
        ({}, [1.0, 1.0], None),
        ({"filter_zero_variance": True}, [1.0, 1.0, None], "zero_variance"),
        ({"filter_zero_variance": True}, [1.0, 0.0], None),
        ({"filter_mean_range": (0.1, 0.9)}, [0.0, 0.1], "mean_below_range"),
        ({"filter_mean_range": (0.1, 0.9)}, [1.0, 0.9], "mean_above_range"),
        ({"filter_mean_range": (0.1, 0.9)}, [0.1, None], None),
        ({"filter": "test_credit:lucky"}, [0.0, 1.0, 1.0], "unlucky"),
        ({"filter": "test_credit:lucky"}, [0.0, 1.0], None),
    ],
)
def test_drop_reason(options, rewards, expected):
    assert drop_reason(group(rewards), build("grpo", **options)) == expected


RAW = [[0.0, 0.2], [0.5], [0.9, 1.0], [0.5, None], [0.4, 0.4], [0.0], [1.0], [0.6]]
MEANS = [0.1, 0.5, 0.95, 0.5, 0.4, 0.0, 1.0, 0.6]


@pytest.mark.parametrize(
    ("quantiles", "below", "above"),
    [
        ((0.25, 0.75), {0.0, 0.1}, {0.95, 1.0}),
        ((0.0, 0.9), set(), set()),  # a tenth of eight groups is none
        ((0.0, 0.87), set(), {1.0}),
        ((0.5, 1.0), {0.0, 0.1, 0.4}, set()),  # the two at 0.5 stay or go together
        ((0.0, 1.0), set(), set()),
    ],
)
def test_quantiles_leave_out_at_most_these_shares_of_the_batch(quantiles, below, above):
    groups = [group(rewards, id=str(i)) for i, rewards in enumerate(RAW)]
    reasons = batch_drop_reasons(groups, (build("grpo", filter_quantiles=quantiles),))
    assert {mean for mean, why in zip(MEANS, reasons, strict=True) if why == "mean_below_quantile"} == below
    assert {mean for mean, why in zip(MEANS, reasons, strict=True) if why == "mean_above_quantile"} == above
    kept = [mean for mean, why in zip(MEANS, reasons, strict=True) if why is None]
    assert sorted([*kept, *below, *above]) == sorted(MEANS)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 10])
def test_quantiles_never_leave_out_everything_or_one_of_equals(count):
    algorithm = build("grpo", filter_quantiles=(0.45, 0.55))
    equal = [group([0.3, 0.7], id=str(i)) for i in range(count)]
    assert batch_drop_reasons(equal, (algorithm,)) == [None] * count
    unequal = [group([float(i)], id=str(i)) for i in range(count)]
    assert batch_drop_reasons(unequal, (algorithm,)).count(None) >= min(count, 1)


def test_quantiles_compare_the_groups_that_share_an_algorithm():
    halves = build("grpo", filter_quantiles=(0.5, 1.0))
    groups = [
        of(*(with_mixture(t, i % 2) for t in group([float(i)], id=str(i)).trajectories), id=str(i)) for i in range(6)
    ]
    together = batch_drop_reasons(groups, (halves, halves))
    assert together == ["mean_below_quantile"] * 3 + [None] * 3
    first_only = batch_drop_reasons(groups, (halves, build("grpo")))
    assert first_only == ["mean_below_quantile", *[None] * 5]


def with_mixture(trajectory, mixture):
    return dataclasses.replace(trajectory, task=dataclasses.replace(trajectory.task, mixture=mixture))


def test_k76_filters_look_at_raw_rewards_not_at_shaped_ones():
    dapo = build("dapo", overlong_range=(1, 2))
    played = group([1.0, 1.0], lengths=[1, 2])
    assert dapo.shaped_rewards(played).tolist() == [1.0, 0.0]
    assert drop_reason(played, dapo) == "zero_variance"
    varied = group([1.0, 2.0], lengths=[1, 2])
    assert dapo.shaped_rewards(varied).tolist() == [1.0, 1.0]
    assert drop_reason(varied, dapo) is None


def calls_it_eval(group):
    return "eval"


def test_a_filter_may_not_call_what_it_drops_as_what_was_kept_is_called():
    with pytest.raises(
        TrainingError, match=r"returned 'eval', which is what .* \(train, eval, queued, late\); give the reason"
    ):
        drop_reason(group([0.0, 1.0]), build("grpo", filter="test_credit:calls_it_eval"))


def test_a_filter_that_returns_anything_but_a_reason_ends_the_run():
    with pytest.raises(TrainingError, match=r"'test_credit:broken' returned True; it must return a reason"):
        drop_reason(group([0.0, 1.0]), build("grpo", filter="test_credit:broken"))
