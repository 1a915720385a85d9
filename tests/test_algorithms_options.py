"""What `[algorithm]` refuses when a config is read, and why."""

from pathlib import Path

import pytest
from algorithm_cases import NAMES, NEEDED, build

from relax_gym.config import dump_config, load_algorithms, load_config, parse_config
from relax_gym.errors import ConfigError
from relax_gym.kept_config import config_to_keep
from relax_gym.types import Group


def parse(algorithm, **sections):
    train = {"steps": 1, "groups_per_step": 2, "group_size": 4, **sections.pop("train", {})}
    return parse_config(
        {
            "model": {"name": "m"},
            "env": [{"id": "relax_gym/GuessNumber-v0"}],
            "rollout": {"max_turns": 2, "max_new_tokens": 8},
            "algorithm": algorithm,
            "train": train,
            **sections,
        },
        source="run.toml",
    )


def bad_filter(group: Group) -> str:
    return f"seen {len(group.trajectories)}"


@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_is_chosen_by_name_and_survives_the_round_trip(name, tmp_path: Path):
    config = parse({"name": name, **NEEDED.get(name, {})})
    path = tmp_path / "run.toml"
    path.write_text(dump_config(config))
    assert config_to_keep(load_config(path)) == config_to_keep(config)
    assert load_algorithms(load_config(path)) == load_algorithms(config)


DEFAULTS = {
    "cispo": ("token-mean", (1.0, 4.0)),
    "dapo": ("token-mean", (0.2, 0.28)),
    "dr_grpo": ("seq-mean-token-sum-norm", (0.2, 0.2)),
    "grpo": ("seq-mean-token-mean", (0.2, 0.2)),
    "gspo": ("seq-mean-token-mean", (3e-4, 4e-4)),
    "gspo_token": ("seq-mean-token-mean", (3e-4, 4e-4)),
    "reinforce_pp": ("token-mean", (0.2, 0.2)),
    "reinforce_pp_baseline": ("token-mean", (0.2, 0.2)),
    "rloo": ("token-mean", None),
    "sapo": ("seq-mean-token-mean", None),
    "sft": ("token-mean", None),
}


@pytest.mark.parametrize("name", NAMES)
def test_the_documentation_names_every_algorithm_and_option(name):
    text = (Path(__file__).parent.parent / "docs" / "algorithms.md").read_text(encoding="utf-8")
    assert f"| `{name}` |" in text
    missing = [field for field in type(build(name)).model_fields if f"`{field}" not in text]
    assert missing == []


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_the_papers(name):
    algorithm = build(name)
    clip = (algorithm.clip_low, algorithm.clip_high) if hasattr(algorithm, "clip_low") else None
    assert (algorithm.aggregation, clip) == DEFAULTS[name]
    assert (algorithm.kl_coef, algorithm.kl_reward_coef, algorithm.correction) == (0.0, 0.0, "none")
    assert algorithm.filter_zero_variance is (name == "dapo")
    assert algorithm.needs_group is (name not in ("reinforce_pp", "sft"))


TIS = {"name": "rloo", "correction": "tis", "old_logprobs": "recompute"}
ICEPOP = {"name": "grpo", "correction": "icepop", "old_logprobs": "recompute"}


@pytest.mark.parametrize(
    ("algorithm", "sections", "message"),
    [
        ({"name": "gpso"}, {}, "unknown algorithm 'gpso'; did you mean 'gspo'?"),
        (
            {"name": "sapo", "tau_pos": 1.0},
            {},
            "unknown key 'algorithm.tau_pos' (value 1.0); did you mean 'tau_",
        ),
        ({"name": "grpo", "correction": "tiss"}, {}, "algorithm.correction = 'tiss': Input should be 'none', 'tis' or"),
        (
            {"name": "grpo", "kl_estimator": "k1", "kl_coef": 0.1},
            {},
            "k1 is no loss: its gradient does not depend on the reference model",
        ),
        (
            {"name": "grpo", "kl_reward_estimator": "k2"},
            {},
            "algorithm.kl_reward_estimator = 'k2': Input should be 'k1' or 'k3'",
        ),
        (
            {"name": "grpo", "correction": "tis"},
            {},
            "correction = 'tis' needs old_logprobs = 'recompute': with 'rollout' the ratio is taken against the "
            "sampler's own log-probs already, and every weight is 1",
        ),
        (
            {"name": "grpo", "icepop_low": 1.5},
            {},
            "algorithm.icepop_low = 1.5: Input should be less than or",
        ),
        ({"name": "dr_grpo"}, {}, "dr_grpo divides each sample's sum by a constant: give token_sum_norm"),
        ({"name": "dr_grpo", "aggregation": "token-mean", "token_sum_norm": 1.0}, {}, "go together"),
        ({"name": "grpo", "discount": 0.9}, {}, "discount = 0.9 goes with credit = 'turn'"),
        ({"name": "grpo", "correction_cap": 3.0}, {}, "correction_cap = 3.0 goes with correction = 'tis'"),
        (ICEPOP | {"correction_cap": 3.0}, {}, "correction_cap = 3.0 goes with correction = 'tis'"),
        (TIS | {"icepop_low": 0.2}, {}, "icepop_low = 0.2 goes with correction = 'icepop'"),
        ({"name": "grpo", "icepop_high": 5.0}, {}, "icepop_high = 5.0 goes with correction = 'icepop'"),
        ({"name": "grpo", "correction_level": "sequence"}, {}, "correction_level = 'sequence' goes with a correction"),
        ({"name": "grpo", "kl_estimator": "k2"}, {}, "kl_estimator = 'k2' goes with kl_coef > 0 and does nothing"),
        (
            {"name": "reinforce_pp_baseline", "kl_estimator": "k3"},
            {},
            "kl_estimator = 'k3' goes with kl_coef > 0 and does nothing",
        ),
        ({"name": "grpo", "kl_reward_estimator": "k3"}, {}, "kl_reward_estimator = 'k3' goes with kl_reward_coef > 0"),
        ({"name": "sft", "credit": "turn"}, {}, "credit = 'turn' does not go with sft"),
        (
            {"name": "sft", "kl_reward_coef": 0.1},
            {},
            "kl_reward_coef = 0.1 does not go with sft, which has no reward in its loss to subtract it from; set kl_",
        ),
        ({"name": "grpo", "filter_quantiles": [0.9, 0.1]}, {}, "filter_quantiles = [0.9, 0.1] are no quantiles"),
        ({"name": "grpo", "filter_quantiles": [0.1, 10]}, {}, "filter_quantiles = [0.1, 10.0] are no quantiles"),
        (
            {"name": "grpo", "credit": "turn"},
            {"reward": [{"name": "env", "weight": 0.5}]},
            "[[reward]] must have 'env' with weight 1 (it has {'env': 0.5})",
        ),
        (
            {"name": "grpo", "credit": "turn"},
            {"reward": [{"name": "exact_match"}]},
            "[[reward]] must have 'env' with weight 1",
        ),
        ({"name": "grpo", "filter_mean_range": [0.9, 0.1]}, {}, "filter_mean_range = [0.9, 0.1] is empty"),
        ({"name": "grpo", "filter": "nowhere:f"}, {}, "algorithm.filter = 'nowhere:f': cannot load 'nowhere:f'"),
        ({"name": "grpo", "filter": "math:pi"}, {}, "algorithm.filter = 'math:pi': is a float; give a function"),
        ({"name": "dapo", "overlong_range": [16, 20]}, {}, "overlong_range = [16, 20] punishes nothing"),
        ({"name": "dapo", "overlong_range": [8, 8]}, {}, "start must be below end and below 16"),
        ({"name": "rloo"}, {"train": {"max_staleness": 1}}, "max_staleness = 1 with update_every = 1 would train on"),
        ({"name": "rloo"}, {"learner": {"name": "torch", "epochs": 2}}, "learner.epochs must be 1"),
        (TIS, {"learner": {"name": "torch", "updates_per_step": 2}}, "learner.updates_per_step must be 1"),
        (
            {"name": "grpo", "filter_quantiles": [0.1, 0.9]},
            {"learner": {"name": "torch", "updates_per_step": 2}},
            "algorithm.filter_quantiles leaves a number of groups that learner.updates_per_step = 2 need not divide",
        ),
        ({"name": "rloo"}, {"train": {"group_size": 1}}, "RLOO compares the episodes of a group; give 2 or more"),
    ],
)
def test_what_cannot_work_is_refused_at_parse_with_the_reason(algorithm, sections, message):
    with pytest.raises(ConfigError) as caught:
        parse(algorithm, **sections)
    assert str(caught.value).startswith("run.toml: ")
    assert message in str(caught.value)


OPD = {"name": "opd", "teacher": "t"}
POLICY_GRADIENT = [{"rl_weight": 1.0}, {"level": "reward"}, {"kl_reward_coef": 0.1}]
IDLE = {
    "correction_cap": 2.0,
    "correction_level": "token",
    "icepop_low": 0.5,
    "icepop_high": 2.0,
    "kl_reward_estimator": "k1",
    "discount": 1.0,
}


@pytest.mark.parametrize(
    "algorithm",
    [*({"name": name} for name in NAMES if name != "sft"), *(OPD | more for more in POLICY_GRADIENT)],
)
def test_stale_tokens_that_nothing_corrects_are_refused(algorithm):
    algorithm = {**NEEDED.get(algorithm["name"], {}), **algorithm, "old_logprobs": "recompute"}
    parse(algorithm)
    with pytest.raises(ConfigError, match=r"train.max_staleness = 2 .*would train on stale tokens as if they were on"):
        parse(algorithm, train={"max_staleness": 2})
    for correction in ("tis", "icepop"):
        parse(algorithm | {"correction": correction}, train={"max_staleness": 2})


@pytest.mark.parametrize(
    ("algorithm", "sections"),
    [
        (TIS, {"train": {"max_staleness": 2}}),
        ({"name": "grpo"}, {"train": {"max_staleness": 2}}),
        ({"name": "sft", "old_logprobs": "recompute"}, {"train": {"max_staleness": 2}}),
        (OPD | {"old_logprobs": "recompute"}, {"train": {"max_staleness": 2}}),
        (ICEPOP | {"icepop_high": 5.0, "correction_level": "sequence"}, {}),
        ({"name": "grpo", "kl_coef": 0.1, "kl_estimator": "k2", "filter_quantiles": [0.0, 0.5]}, {}),
        ({"name": "sft"}, {"train": {"group_size": 1}}),
        ({"name": "reinforce_pp", "kl_reward_coef": 0.1}, {"train": {"group_size": 1}}),
        ({"name": "grpo", "credit": "turn", "discount": 0.9}, {}),
        ({"name": "dapo", "overlong_range": [12, 16]}, {}),
        ({"name": "grpo", "filter": "test_algorithms_options:bad_filter", "filter_mean_range": [0.1, 0.9]}, {}),
        ({"name": "dr_grpo", "aggregation": "token-mean"}, {}),
        ({"name": "grpo", "kl_coef": 0.0, "kl_estimator": "k3", **IDLE}, {}),
        ({"name": "reinforce_pp_baseline", "kl_estimator": "k2", **IDLE}, {}),
        (OPD | {"jsd_alpha": 0.5}, {}),
    ],
)
def test_what_can_work_is_taken(algorithm, sections):
    assert parse(algorithm, **sections).algorithm.name == algorithm["name"]
