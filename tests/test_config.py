import tomllib
from dataclasses import replace

import pytest
from algorithm_cases import group
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_gym.algorithm import Algorithm
from relax_gym.config import RunConfig, dump_config, load_algorithms, load_config, parse_config
from relax_gym.credit import assign_credit
from relax_gym.errors import ConfigError
from relax_gym.kept_config import config_to_keep

MINIMAL = """
[model]
name = "tiny-qwen3"
[[env]]
id = "relax_gym/GuessNumber-v0"
[train]
steps = 2
groups_per_step = 2
group_size = 2
"""


def write(tmp_path, text: str) -> str:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return str(path)


def parse(**changes: object) -> RunConfig:
    data = tomllib.loads(MINIMAL)
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            data.setdefault(section, {})[name] = value
        else:
            data[section] = value
    return parse_config(data)


def test_defaults_are_filled_in(tmp_path) -> None:
    config = load_config(write(tmp_path, MINIMAL))
    assert config.sampler.name == "local"
    assert config.algorithm.name == "grpo"
    assert [reward.name for reward in config.reward] == ["env"]
    assert config.train.max_staleness == 0


def test_overrides_take_toml_values_or_text(tmp_path) -> None:
    overrides = ["train.steps=9", "run_dir=runs/x", "env.0.kwargs.low=3", 'rollout.stop=["\\n"]', "learner.lr=1e-4"]
    config = load_config(write(tmp_path, MINIMAL), overrides)
    assert config.train.steps == 9
    assert config.run_dir == "runs/x"
    assert config.env[0].kwargs == {"low": 3}
    assert config.rollout.stop == ("\n",)
    assert config.learner.options == {"lr": 1e-4}


@settings(deadline=None)
@given(
    st.integers(0, 2**31 - 1),
    st.floats(1e-3, 10),
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=3),
    st.dictionaries(st.sampled_from(["low", "high"]), st.integers(-5, 5)),
)
def test_dump_then_load_is_the_identity(seed: int, temperature: float, stop: list[str], kwargs: dict[str, int]) -> None:
    config = parse(
        seed=seed,
        rollout={"temperature": temperature, "stop": stop},
        env=[{"id": "relax_gym/GuessNumber-v0", "kwargs": kwargs, "weight": 2.5}],
        warmup={"steps": 3},
        learner={"name": "torch", "lr": 1e-4},
    )
    again = parse_config(tomllib.loads(dump_config(config)))
    assert config_to_keep(again) == config_to_keep(config)
    plugins = {"learner": again.learner, "sampler": again.sampler, "algorithm": again.algorithm}
    assert config.model_copy(update={**plugins, "trackers": again.trackers}) == again


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"trian": {}}, "unknown key 'trian' (value {}); did you mean 'train'?"),
        ({"train__group_sise": 4}, "unknown key 'train.group_sise' (value 4); did you mean 'group_size'?"),
        ({"train__steps": "many"}, "train.steps = 'many': Input should be a valid integer"),
        ({"train__steps": -1}, "train.steps = -1: Input should be greater than or equal to 0"),
        ({"train__group_size": 1}, "train.group_size = 1: GRPO compares the episodes of a group; give 2 or more"),
        ({"rollout__temperature": 0}, "rollout.temperature = 0: Input should be greater than 0"),
        ({"rollout__temperature": -1.0}, "rollout.temperature = -1.0: Input should be greater than 0"),
        ({"rollout__top_p": 1.5}, "rollout.top_p = 1.5: Input should be less than or equal to 1"),
        ({"rollout__temperature": True}, "rollout.temperature = True: a boolean is no number; give a number"),
        ({"threads": True}, "threads = True: a boolean is no number"),
        ({"learner": {"name": "megatron", "tp": True}}, "learner.tp = True: a boolean is no number"),
        ({"learner": {"name": "torch", "lora": {"rank": True}}}, "learner.lora.rank = True: a boolean is no number"),
        ({"algorithm": {"name": "grpo", "clip_low": True}}, "algorithm.clip_low = True: a boolean is no number"),
        ({"model": {}}, "key 'model.name' is missing"),
        ({"env": []}, "env"),
        (
            {"env": [{"id": "relax_gym/GuesNumber-v0"}]},
            "unknown env 'relax_gym/GuesNumber-v0'; did you mean 'relax_gym/GuessNumber-v0'?",
        ),
        (
            {"env": [{"id": "relax_gym/GuessNumber-v0", "kwargs": {"hihg": 3}}]},
            "env 'relax_gym/GuessNumber-v0' takes no argument 'hihg'; did you mean 'high'?",
        ),
        ({"reward": [{"name": "exact_mach"}]}, "unknown reward 'exact_mach'; did you mean 'exact_match'?"),
        ({"reward": [{"name": "env"}, {"name": "env"}]}, "reward names are ['env', 'env']"),
        ({"reward": [{"name": "mean"}]}, "reward names are ['mean']; 'mean' is taken by the metric reward/mean"),
        ({"reward": [{"name": "env"}, {"name": "std"}]}, "'std' is taken by the metric reward/std"),
        ({"algorithm": {"name": "grpoo"}}, "unknown algorithm 'grpoo'; did you mean 'grpo'?"),
        (
            {"algorithm": {"name": "grpo", "clip_hi": 0.3}},
            "unknown key 'algorithm.clip_hi' (value 0.3); did you mean 'clip_high'?",
        ),
        (
            {"algorithm": {"name": "grpo", "kl_estimator": "k1", "kl_coef": 0.1}},
            "algorithm.kl_estimator = 'k1': k1 is no loss: its gradient does not depend on the reference model",
        ),
        ({"algorithm": {"name": "grpo", "aggregation": "seq-mean-token-sum-norm"}}, "go together"),
        (
            {"algorithm": {"name": "grpo", "correction": "tiss"}},
            "algorithm.correction = 'tiss': Input should be 'none', 'tis' or 'icepop'; did you mean 'tis'?",
        ),
        (
            {"chat": {"tool_role": "usr"}},
            "chat.tool_role = 'usr': Input should be 'tool' or 'user'; did you mean 'user'?",
        ),
        ({"sampler": {"name": "lokal"}}, "unknown sampler 'lokal'; did you mean 'local'?"),
        ({"sampler": {"name": "local", "max_slot": 3}}, "did you mean 'max_slots'?"),
        (
            {"learner": {"name": "torch", "updates_per_step": 3}},
            "learner.updates_per_step = 3 does not divide train.groups_per_step = 2",
        ),
        ({"learner": {"name": "torch", "lr": 0}}, "learner.lr = 0: Input should be greater than 0"),
        ({"trackers": [{"name": "tensorbord"}]}, "unknown tracker 'tensorbord'; did you mean 'tensorboard'?"),
        ({"seed": -1}, "seed = -1: Input should be greater than or equal to 0"),
    ],
)
def test_k119_bad_values_are_refused_at_parse_with_advice(changes: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(**changes)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[model\nname = 1", "run.toml is not valid TOML: Expected ']' at the end of a table declaration (at line 1"),
        ("seed = 1\nseed = 2", "run.toml is not valid TOML: Cannot overwrite a value (at end of document)"),
    ],
)
def test_malformed_toml_names_file_and_line(tmp_path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text))
    assert expected in str(caught.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot read config 'no/such.toml': No such file or directory"):
        load_config("no/such.toml")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps", "--set 'train.steps' is malformed; write --set section.key=value"),
        ("seed.x=1", "'seed' is a value, not a section"),
        ("env.4.id=x", "'4' is not an index of a list of 1"),
        ("env.first.id=x", "'first' is not an index of a list of 1"),
    ],
)
def test_malformed_overrides(tmp_path, override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, "seed = 1\n" + MINIMAL), [override])
    assert expected in str(caught.value)


def test_every_fault_is_reported_at_once(tmp_path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, MINIMAL.replace("steps = 2", "steps = 'x'\nfoo = 1")))
    lines = str(caught.value).split("\n")
    assert len(lines) == 2
    assert all(line.startswith(str(tmp_path / "run.toml")) for line in lines)


def mixture(own: dict[str, object]) -> tuple[Algorithm, ...]:
    envs = [{"id": "relax_gym/GuessNumber-v0"}, {"id": "relax_gym/GuessNumber-v0", "algorithm": own}]
    return load_algorithms(parse(env=envs, algorithm={"name": "reinforce_pp", "clip_low": 0.2}))


def test_envs_with_equal_algorithms_share_one() -> None:
    common, own = mixture({"name": "reinforce_pp"})
    assert common is own
    common, own = mixture({"name": "reinforce_pp", "clip_low": 0.3})
    assert (common is own, own.clip_low) == (False, 0.3)


def test_giving_every_env_the_same_algorithm_by_itself_changes_nothing() -> None:
    played = [group([1.0, 0.0], id="a"), group([5.0, 9.0], id="b")]
    second = [replace(t, task=replace(t.task, mixture=1)) for t in played[1].trajectories]
    played[1] = replace(played[1], trajectories=tuple(second))
    apart = assign_credit(played, mixture({"name": "reinforce_pp"}))
    together = assign_credit(played, mixture({"name": "reinforce_pp"})[:1] * 2)
    values = [sample.advantages.tolist() for sample in apart]
    assert values == [sample.advantages.tolist() for sample in together]
    assert values[0][-1] < 0  # whitened with the higher rewards of the other env
