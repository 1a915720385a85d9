"""Routed experts from the sampler's completions through samples and packing into the routers of a Qwen3-MoE."""

import dataclasses

import numpy as np
import pytest
import torch
from learner_cases import SMALL, context, gradient, learner, random_batch, sample, save_model, without_seconds
from test_trajectory import episode, turn
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from relax_gym.errors import TrainingError
from relax_gym.trajectory import to_samples
from relax_gym.types import Batch
from relax_gym_trainers.torch_learner.packing import UNROUTED, pack
from relax_gym_trainers.torch_learner.replay import router_scores

LAYERS, TOP_K, EXPERTS = 2, 2, 4


def routed(step, rows):
    """Rows of experts that say by whom and where they were made: 100 · row + step, in layers 0 and 1."""
    values = 100 * np.arange(rows)[:, None, None] + step + np.zeros((rows, LAYERS, TOP_K))
    return values.astype(np.int32)


def with_experts(one, experts):
    return dataclasses.replace(one, completion=dataclasses.replace(one.completion, routed_experts=experts))


# ---- from turns to samples -----------------------------------------------------------------------


def test_k41_each_token_keeps_the_experts_of_the_turn_that_first_computed_it():
    first, second = with_experts(turn([1, 2], [3, 4]), routed(1, 3)), with_experts(turn([5], [6, 7]), routed(2, 6))
    (made,) = to_samples(episode(first, second), "g")
    assert len(made.token_ids) == 7
    assert made.routed_experts[:, 0, 0].tolist() == [1, 101, 201, 302, 402, 502]


def test_k41_each_segment_has_its_own_experts():
    first = with_experts(turn([1, 2], [3]), routed(1, 2))
    second = with_experts(turn([9, 8, 7], [4], new=True), routed(2, 3))
    one, two = to_samples(episode(first, second), "g")
    assert one.routed_experts[:, 0, 0].tolist() == [1, 101]
    assert two.routed_experts[:, 0, 0].tolist() == [2, 102, 202]


def test_k42_experts_are_copied_typed_and_carried_by_every_path():
    given = routed(1, 3)
    given.setflags(write=False)
    (made,) = to_samples(episode(with_experts(turn([1, 2], [3, 4]), given)), "g")
    assert made.routed_experts.flags.writeable
    assert made.routed_experts.dtype == np.int32
    assert not np.shares_memory(made.routed_experts, given)


@pytest.mark.parametrize("rows", [2, 4, 1])
def test_k41_a_wrong_number_of_experts_is_refused(rows):
    with pytest.raises(ValueError, match=rf"routed_experts has {rows} rows for 4 tokens"):
        to_samples(episode(with_experts(turn([1, 2], [3, 4]), routed(1, rows))), "g")
    with pytest.raises(ValueError, match=r"has shape \(3, 2, 2\) for 3 tokens; it must be \[tokens - 1, layers"):
        dataclasses.replace(sample([1, 2, 3], [0, 0, 1]), routed_experts=routed(0, 3))


def test_k42_experts_for_some_turns_only_are_refused():
    with pytest.raises(ValueError, match="some turns of a segment have routed experts and some have none"):
        to_samples(episode(with_experts(turn([1], [2]), routed(0, 1)), turn([3], [4])), "g")


# ---- packing -------------------------------------------------------------------------------------


def packable(ids, mask, step, **names):
    return dataclasses.replace(sample(ids, mask, **names), routed_experts=routed(step, len(ids) - 1))


@pytest.mark.parametrize("share", [True, False])
def test_k41_experts_stay_with_their_tokens_through_shared_prompts_and_padding(share):
    samples = [
        packable([5, 6, 7, 8, 9], [0, 0, 1, 1, 0], 1, episode="a"),
        packable([5, 6, 3, 4, 2, 1], [0, 0, 1, 0, 1, 1], 2, episode="b"),
        sample([9, 9, 4, 4], [0, 0, 1, 1], episode="c"),
    ]
    (batch,) = pack(samples, budget=100, share_prefix=share)
    assert batch.experts.shape == (*batch.ids.shape, LAYERS, TOP_K)
    lines = {tuple(ids): line for ids, line in zip(batch.ids.tolist(), batch.experts[:, :, 1, 1].tolist(), strict=True)}
    none = UNROUTED
    if share:
        assert lines == {
            (5, 6, 7, 3, 4, 2): [1, 101, 201, 202, 302, 402],
            (9, 9, 4, 0, 0, 0): [none] * 6,
        }
    else:
        assert lines == {
            (5, 6, 3, 4, 2): [2, 102, 202, 302, 402],
            (5, 6, 7, 0, 0): [1, 101, 201, none, none],
            (9, 9, 4, 0, 0): [none] * 5,
        }


def test_batches_without_experts_carry_none_and_different_shapes_are_refused():
    (batch,) = pack(random_batch().samples, budget=1000, share_prefix=True)
    assert batch.experts is None
    odd = dataclasses.replace(sample([5, 6, 7], [0, 0, 1]), routed_experts=np.zeros((2, 3, 2), dtype=np.int32))
    with pytest.raises(TrainingError, match=r"different \[layers, top_k\]: \[\(2, 2\), \(3, 2\)\]"):
        pack([packable([5, 6, 7], [0, 0, 1], 0), odd], budget=100, share_prefix=False)


# ---- the model -----------------------------------------------------------------------------------


@pytest.fixture(scope="session", params=[True, False], ids=["normed", "plain"])
def moe(request, tmp_path_factory):
    config = Qwen3MoeConfig(
        **{**SMALL, "hidden_size": 32, "moe_intermediate_size": 16, "head_dim": 8},
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=request.param,
    )
    return save_model(tmp_path_factory.mktemp("models") / "moe", config)


def with_choice(batch, choose):
    """The batch with experts [T − 1, layers, top_k] that `choose` makes for each sample."""
    return Batch(
        version=batch.version, samples=[dataclasses.replace(s, routed_experts=choose(s)) for s in batch.samples]
    )


def own_choice(model, one):
    chosen = []
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output: chosen.append(output[2]))
        for module in model.modules()
        if type(module).__name__ == "Qwen3MoeTopKRouter"
    ]
    with torch.no_grad():
        model(input_ids=torch.from_numpy(one.token_ids.astype(np.int64))[None, :-1])
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1).numpy().astype(np.int32)


def test_replaying_the_models_own_choice_changes_nothing(moe):
    trainer = learner(context(moe))
    batch = random_batch()
    loss, grad, _ = gradient(trainer, batch, old="rollout")
    replayed = with_choice(batch, lambda one: own_choice(trainer.policy.model, one))
    same_loss, same, part = gradient(trainer, replayed, old="rollout")
    assert part.micro_batches[0].experts is not None
    assert same_loss == pytest.approx(loss, rel=1e-5)
    assert (same - grad).norm() <= 1e-5 * grad.norm()


def forced(one):
    """Every token to experts 3 and 1 in layer 0, 0 and 2 in layer 1."""
    return np.tile(np.array([[3, 1], [0, 2]], dtype=np.int32), (len(one.token_ids) - 1, 1, 1))


@pytest.mark.parametrize(("share", "checkpointing"), [(True, False), (False, True)])
def test_only_the_given_experts_work_and_the_router_keeps_its_gradient(moe, share, checkpointing):
    trainer = learner(context(moe), activation_checkpointing=checkpointing)
    gradient(trainer, with_choice(random_batch(), forced), old="rollout", share=share)
    for layer, working in enumerate([{1, 3}, {0, 2}]):
        block = trainer.policy.model.model.layers[layer].mlp
        per_expert = block.experts.down_proj.grad.flatten(1).abs().amax(1)
        assert {index for index in range(EXPERTS) if per_expert[index] > 0} == working
        assert block.gate.weight.grad.abs().max() > 0


def scores(trainer, samples):
    """Sum of the log-probs of each episode."""
    out = {}
    for batch in trainer.objectives[0].part(samples, skip_flat=False).micro_batches:
        with torch.no_grad():
            pieces = trainer.policy.score(batch)[0].split(batch.token_counts.tolist())
        out |= {member.episode_id: values for member, values in zip(batch.members, pieces, strict=True)}
    return out


def test_pads_and_samples_without_experts_are_routed_by_the_model(moe):
    trainer = learner(context(moe))
    plain = list(random_batch().samples)
    routed_too = list(with_choice(random_batch(), forced).samples)
    own, mixed = scores(trainer, plain), scores(trainer, plain[:3] + routed_too[3:])
    for index in range(3):
        torch.testing.assert_close(mixed[f"g0e{index}"], own[f"g0e{index}"], rtol=0, atol=1e-5)
        assert (mixed[f"g1e{index}"] - own[f"g1e{index}"]).abs().max() > 1e-3


def test_replay_closes_the_gap_that_another_routing_opened(moe):
    """The sampler's log-probs come from a forced routing; with its experts the learner finds the same numbers."""
    trainer = learner(context(moe))
    batch = with_choice(random_batch(), forced)
    exact = scores(trainer, batch.samples)

    def sampled(one):
        logprobs = np.zeros(len(one.token_ids), dtype=np.float32)
        logprobs[one.loss_mask == 1] = exact[one.episode_id].numpy()
        return dataclasses.replace(one, logprobs=logprobs)

    recorded = Batch(version=0, samples=[sampled(one) for one in batch.samples])
    forgotten = Batch(version=0, samples=[dataclasses.replace(s, routed_experts=None) for s in recorded.samples])
    assert without_seconds(trainer.step(recorded))["logprob_diff_max"] < 1e-5
    assert learner(context(moe)).step(forgotten)["logprob_diff_mean"] > 1e-3


def test_a_router_that_always_divides_by_the_sum_is_replayed_so():
    router = MixtralTopKRouter(MixtralConfig(hidden_size=8, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K))
    torch.nn.init.normal_(router.weight)
    logits, own_scores, own = router(torch.randn(5, 8))
    torch.testing.assert_close(router_scores(router, logits, own), own_scores)


def test_experts_of_another_model_are_refused(moe, tmp_path):
    odd = with_choice(random_batch(), lambda one: np.zeros((len(one.token_ids) - 1, 3, 2), dtype=np.int32))
    with pytest.raises(TrainingError, match=r"2 experts in each of 3 layers; the model here has routers with top_k"):
        learner(context(moe)).step(odd)
