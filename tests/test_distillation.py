"""On-policy distillation: divergences, the gradient of the chunked head, and what is refused when a config is read."""

import json
import math
import tomllib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from algorithm_cases import build, tokens
from test_algorithms_options import parse

from relax_gym.config import dump_config, load_algorithms, parse_config
from relax_gym.errors import ConfigError
from relax_gym.kept_config import config_to_keep
from relax_gym_trainers.functional import (
    append_tail,
    distilled_advantages,
    divergence,
    forward_kl,
    jsd,
    reverse_kl,
    select_with_tail,
)
from relax_gym_trainers.torch_learner.divergence import TopTokens, _HeadDivergence
from relax_gym_trainers.torch_learner.logprobs import Head

FORMS = [("reverse", 0.5), ("forward", 0.5), ("jsd", 0.5), ("jsd", 0.2)]


def logs(*probabilities):
    return torch.tensor(probabilities, dtype=torch.float64).log()


def random_logprobs(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(*shape, dtype=torch.float64, generator=generator)).log_softmax(-1)


# ---- pure functions ------------------------------------------------------------------------------


def test_literal_values_of_top_1_with_tail():
    p, q = append_tail(logs(0.6)), append_tail(logs(0.3))
    assert p.exp().tolist() == pytest.approx([0.6, 0.4])
    assert reverse_kl(p, q).item() == pytest.approx(0.192042, abs=1e-6)
    assert forward_kl(p, q).item() == pytest.approx(0.183787, abs=1e-6)
    assert jsd(p, q, alpha=0.5).item() == pytest.approx(0.046201, abs=1e-6)
    assert jsd(p, q, alpha=0).item() == pytest.approx(0.192042, abs=1e-6)
    assert jsd(p, q, alpha=1).item() == pytest.approx(0.183787, abs=1e-6)
    full = logs(0.1, 0.6, 0.3)
    assert select_with_tail(full, torch.tensor([1])).exp().tolist() == pytest.approx([0.6, 0.4])


def test_values_over_three_tokens():
    p, q = logs(0.5, 0.3, 0.2), logs(0.2, 0.2, 0.6)
    expected = 0.5 * math.log(2.5) + 0.3 * math.log(1.5) - 0.2 * math.log(3)
    assert divergence(p, q, "reverse").item() == pytest.approx(expected)
    assert expected == pytest.approx(0.360062, abs=1e-6)
    assert divergence(p, q, "forward").item() == pytest.approx(0.394816, abs=1e-6)
    assert divergence(p, q, "jsd", alpha=0.25).item() == pytest.approx(0.070063, abs=1e-6)


@pytest.mark.parametrize(("form", "alpha"), FORMS)
def test_equal_distributions_are_at_distance_0_with_gradient_0(form, alpha):
    q = random_logprobs(0, 4, 9)
    logits = q.clone().requires_grad_()
    value = divergence(logits.log_softmax(-1), q, form, alpha=alpha)
    assert value.abs().max() < 1e-15
    assert torch.autograd.grad(value.sum(), logits)[0].abs().max() < 1e-15
    assert divergence(random_logprobs(1, 4, 9), q, form, alpha=alpha).min() > 0.05


@pytest.mark.parametrize(("form", "alpha"), FORMS)
def test_gradients(form, alpha):
    logits, q = random_logprobs(0, 3, 6).requires_grad_(), random_logprobs(1, 3, 6)
    ids = q.topk(2).indices
    top = append_tail(q.gather(-1, ids))
    over_all = partial(divergence, form=form, alpha=alpha)
    assert torch.autograd.gradcheck(lambda x: over_all(x.log_softmax(-1), q), (logits,))
    assert torch.autograd.gradcheck(lambda x: over_all(select_with_tail(x.log_softmax(-1), ids), top), (logits,))


@pytest.mark.parametrize(("form", "alpha"), FORMS)
def test_the_top_of_everything_is_the_whole_vocabulary_and_less_is_less(form, alpha):
    p, q = random_logprobs(0, 5, 8), random_logprobs(1, 5, 8)
    whole = divergence(p, q, form, alpha=alpha)
    last = torch.zeros(5)
    for k in (1, 3, 7):
        ids = q.topk(k).indices
        part = divergence(select_with_tail(p, ids), append_tail(q.gather(-1, ids)), form, alpha=alpha)
        assert (part >= last - 1e-9).all()
        assert (part <= whole + 1e-9).all()
        last = part
    torch.testing.assert_close(last, whole, rtol=1e-9, atol=1e-9)  # with 7 of 8 the tail is one token
    ids = q.topk(8).indices
    nothing_left = divergence(select_with_tail(p, ids), append_tail(q.gather(-1, ids)), form, alpha=alpha)
    torch.testing.assert_close(nothing_left, whole, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("form", "alpha"), FORMS)
def test_tokens_that_both_exclude_make_no_nan(form, alpha):
    logits = torch.tensor([0.5, 0.1, -math.inf], requires_grad=True)
    value = divergence(logits.log_softmax(-1), torch.tensor([0.1, 0.5, -math.inf]).log_softmax(-1), form, alpha=alpha)
    (gradient,) = torch.autograd.grad(value, logits)
    assert value.item() > 0
    assert gradient.isfinite().all()
    assert gradient[2] == 0


@pytest.mark.parametrize(("ours", "theirs"), [(0.3, 0.3), (0.5, 0.5), (0.9, 0.9), (0.0, 1.0), (1.0, 0.0)])
def test_trl_has_the_same_divergences_and_swaps_the_ends(ours, theirs, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.gkd import GKDTrainer

    p, q = random_logprobs(0, 7, 9), random_logprobs(1, 7, 9)
    expected = GKDTrainer.generalized_jsd_loss(p[None], q[None], beta=theirs, reduction="none")[0].sum(-1)
    torch.testing.assert_close(jsd(p, q, alpha=ours), expected)


def test_the_sampled_tokens_gradient_is_that_of_the_reverse_kl_in_expectation():
    q = random_logprobs(1, 6)
    logits = random_logprobs(0, 6).requires_grad_()
    p = logits.log_softmax(-1)
    (expected,) = torch.autograd.grad(reverse_kl(p, q), logits, retain_graph=True)
    constant = p.detach().numpy()
    advantages = distilled_advantages(np.zeros(6), constant, q.numpy(), weight=1.0)
    each = build("opd", teacher="t", level="reward").token_loss(tokens(p, advantages, old=constant.tolist()))
    (got,) = torch.autograd.grad((p.detach().exp() * each).sum(), logits)
    torch.testing.assert_close(got, expected)


def test_the_reward_form_in_numbers():
    got = distilled_advantages(np.array([0.5, -1.0]), np.array([-1.0, -2.0]), np.array([-3.0, -0.5]), weight=0.1)
    assert got.tolist() == pytest.approx([0.5 - 0.2, -1.0 + 0.15])


# ---- the chunked head ----------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("top_k", [0, 2])
def test_the_chunked_divergence_has_the_right_gradients(softcap, bias, top_k):
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator, requires_grad=True)

    hidden, weight, offset = tensor(5, 3), tensor(7, 3), tensor(7) if bias else None
    head = Head(weight=weight, bias=offset, scale=1.5, softcap=softcap, temperature=0.8)
    q = random_logprobs(1, 5, 7)

    class Given(TopTokens):
        """Compares with the whole of q."""

        def rows(self, rows):
            return [q[rows]]

        def compare(self, logprobs, *given):
            return self.form(logprobs, given[0]), given[0][:, 0]

    form = partial(divergence, form="jsd", alpha=0.3)
    ids = q.topk(2).indices
    parts = {"ids": ids, "top": append_tail(q.gather(-1, ids)), "logprobs": q[:, 0], "form": form}
    target = TopTokens(**parts) if top_k else Given(**parts)

    def chunked(h, w, b):
        return _HeadDivergence.apply(h, w, b, head, torch.float64, 2, target)[0]

    assert torch.autograd.gradcheck(chunked, (hidden, weight, offset))
    raw = hidden @ weight.T + (0 if offset is None else offset)
    logits = (1.5 * raw if softcap is None else softcap * torch.tanh(1.5 * raw / softcap)) / 0.8
    p = logits.log_softmax(-1)
    plain = form(select_with_tail(p, ids), parts["top"]) if top_k else form(p, q)
    torch.testing.assert_close(chunked(hidden, weight, offset), plain)


# ---- options -------------------------------------------------------------------------------------

GUESS = "relax_gym/GuessNumber-v0"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "opd needs a teacher: give teacher = 'model name', or teachers = {'env id' = 'model name'"),
        ({"teacher": "a", "teachers": {GUESS: "b"}}, "not both"),
        ({"teacher": ""}, "algorithm.teacher = '': String should have at least 1 character"),
        ({"teacher": "a", "level": "reward", "top_k": 4}, "level = 'reward' compares the sampled token only"),
        ({"teacher": "a", "level": "reward", "form": "forward"}, "it has no form = 'forward': use level = 'loss'"),
        ({"teacher": "a", "form": "jsd", "jsd_alpha": 1.5}, "algorithm.jsd_alpha = 1.5: Input should be less than"),
        ({"teacher": "a", "form": "jsd", "jsd_alpha": -0.1}, "algorithm.jsd_alpha = -0.1: Input should be greater"),
        ({"teacher": "a", "jsd_alpha": 0.3}, "jsd_alpha = 0.3 goes with form = 'jsd'; the form is 'reverse'"),
        ({"teacher": "a", "teacher_engine": "lokal", "top_k": 4}, "unknown teacher 'lokal'; did you mean 'local'?"),
        ({"teacher": "a", "teacher_engine": 3}, "algorithm.teacher_engine = 3: Input should be a valid dictionary"),
        (
            {"teacher": "a", "top_k": 4, "teacher_engine": {"devise": "cpu"}},
            "unknown key 'algorithm.teacher_engine.devise' (value 'cpu'); did you mean 'device'?",
        ),
        (
            {"teacher": "a", "top_k": 4, "teacher_engine": {"name": "local", "timeout": 0}},
            "algorithm.teacher_engine.timeout = 0: Input should be greater than 0",
        ),
        (
            {"teacher": "a", "teacher_engine": "local"},
            "a teacher must be a model in the learner's process; with teacher_engine = 'local' give a top_k, or",
        ),
        ({"teacher": "a", "form": "backward"}, "algorithm.form = 'backward': Input should be 'reverse', 'forward' or"),
        ({"teacher": "a", "top_k": -1}, "algorithm.top_k = -1: Input should be greater than or equal to 0"),
        ({"teacher": "a", "opd_weight": 0}, "algorithm.opd_weight = 0: Input should be greater than 0"),
        ({"teacher": "a", "rl_weight": -1}, "algorithm.rl_weight = -1: Input should be greater than or equal to 0"),
        ({"teachers": {}}, f"algorithm.teachers has no teacher for env '{GUESS}'"),
        ({"teachers": {GUESS: "a", "relax_gym/GesNumber-v0": "b"}}, f"did you mean '{GUESS}'?"),
        ({"teacher": "a", "teechers": {}}, "unknown key 'algorithm.teechers' (value {}); did you mean 'teachers'?"),
    ],
)
def test_what_cannot_work_is_refused_at_parse_with_the_reason(options, message):
    with pytest.raises(ConfigError) as caught:
        parse({"name": "opd", **options})
    assert str(caught.value).startswith("run.toml: ")
    assert message in str(caught.value)


def test_group_size_1_needs_no_group_unless_there_is_a_reward():
    one = {"train": {"group_size": 1}}
    assert parse({"name": "opd", "teacher": "a"}, **one).train.group_size == 1
    with pytest.raises(ConfigError, match="OPD compares the episodes of a group"):
        parse({"name": "opd", "teacher": "a", "rl_weight": 1.0}, **one)


def test_an_engine_is_named_alone_or_with_its_options():
    def engine(given):
        config = parse({"name": "opd", "teacher": "a", "level": "reward", "teacher_engine": given})
        assert config_to_keep(parse_config(tomllib.loads(dump_config(config)))) == config_to_keep(config)
        return load_algorithms(config)[0].distillation.engine

    assert (engine("local").name, engine("local").options) == ("local", {})
    assert (engine({"threads": 2}).name, engine({"threads": 2}).options) == ("local", {"threads": 2})
    assert build("opd", teacher="a").distillation.engine is None


def test_the_engine_of_an_env_s_own_algorithm_is_checked():
    own = {"name": "opd", "teacher": "a", "top_k": 4, "teacher_engine": {"device": 3}}
    with pytest.raises(
        ConfigError, match=r"env\.1\.algorithm\.teacher_engine\.device = 3: Input should be a valid str"
    ):
        parse({"name": "grpo"}, env=[{"id": GUESS}, {"id": "relax_gym/TicTacToe-v0", "algorithm": own}])


def test_envs_with_an_algorithm_of_their_own_need_no_teacher_here():
    other = {"id": "relax_gym/TicTacToe-v0"}
    envs = [{"id": GUESS}, {**other, "algorithm": {"name": "grpo"}}]
    assert parse({"name": "opd", "teachers": {GUESS: "a"}}, env=envs)
    with pytest.raises(ConfigError, match="has no teacher for env"):
        parse({"name": "opd", "teachers": {GUESS: "a"}}, env=[{"id": GUESS}, other])
    with pytest.raises(ConfigError, match="which is not distilled"):
        parse({"name": "opd", "teachers": {GUESS: "a", other["id"]: "b"}}, env=envs)


def test_the_documentation_names_every_option():
    text = (Path(__file__).parent.parent / "docs" / "algorithms.md").read_text(encoding="utf-8")
    assert "| `opd` |" in text
    assert [field for field in type(build("opd", teacher="t")).model_fields if f"`{field}" not in text] == []


def test_teachers_survive_the_round_trip(tmp_path):
    config = parse({"name": "opd", "teachers": {GUESS: "a"}, "top_k": 8})
    again = tomllib.loads(dump_config(config))
    assert again["algorithm"]["teachers"] == {GUESS: "a"}
    given = {"name": "opd", "teachers": {GUESS: "a"}, "top_k": 8}
    algorithm = json.loads(json.dumps(again["algorithm"]))
    assert algorithm == algorithm | given
