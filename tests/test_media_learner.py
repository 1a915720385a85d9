"""The torch learner with media: it gives the sampler's log-probs for every family, however samples are packed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
from families import FAMILIES
from local_sampler_kit import play
from media_kit import image
from test_media_sampling import Played, episodes, plans, serving

from relax_gym.config import RunConfig
from relax_gym.context import RunContext
from relax_gym.errors import TrainingError
from relax_gym.models import load_language_model
from relax_gym.types import Batch, StopReason, TrainingSample
from relax_gym_trainers.torch_learner.learner import TorchLearner
from relax_gym_trainers.torch_learner.model import add_adapters, encoder_parameters, export_model
from relax_gym_trainers.torch_learner.options import LoraOptions, TorchLearnerOptions
from relax_gym_trainers.torch_learner.packing import build_rows, pack
from relax_gym_trainers.torch_learner.policy import Policy

pytestmark = pytest.mark.usefixtures("one_thread")


def to_sample(played: Played, *, number: int = 0, group: str = "g") -> TrainingSample:
    """What an episode gives a learner; its advantage depends on its number."""
    conversation, completions = played
    length = len(conversation.token_ids)
    mask, logprobs = np.zeros(length, dtype=np.int8), np.zeros(length, dtype=np.float32)
    spans = [(start, start + len(completion.token_ids)) for start, completion in completions]
    for (start, end), (_, completion) in zip(spans, completions, strict=True):
        mask[start:end], logprobs[start:end] = 1, completion.logprobs
    return TrainingSample(
        episode_id=f"e{number}",
        group_id=group,
        env_id="test/None-v0",
        segment=0,
        token_ids=np.array(conversation.token_ids, dtype=np.int32),
        loss_mask=mask,
        logprobs=logprobs,
        versions=np.where(mask == 1, 0, -1).astype(np.int32),
        advantages=np.where(mask == 1, (-1.0) ** number * (1 + number), 0).astype(np.float32),
        turn_spans=tuple(spans),
        turn_rewards=(0.0,) * len(spans),
        reward=0.0,
        stop_reason=StopReason.ENV_DONE,
        media=tuple(conversation.media),
    )


@functools.cache
def sampled(name: str) -> tuple[TrainingSample, ...]:
    """The first is text only; two begin alike, with media; the others have some kinds in some turns."""

    async def main() -> list[Played]:
        async with serving(name) as sampler:
            with_all, again, without, late, early = plans(name)
            return await episodes(name, sampler, [without, with_all, again, late, early])

    return tuple(to_sample(played, number=number) for number, played in enumerate(play(main())))


def policy(name: str, *, share: bool = True, model: Any = None) -> Policy:
    return Policy(
        model or families.model(name),
        temperature=1.0,
        dtype=torch.float32,
        chunk=16,
        share_prefix=share,
        processor=families.processor(name),
        never_sampled=tuple(families.renderer(name).never_sampled),
    )


@torch.no_grad()
def largest_gap(scorer: Policy, samples: Sequence[TrainingSample], *, budget: int) -> float:
    """Between the scorer's log-probs and those of the samples."""
    batches = pack(samples, budget=budget, share_prefix=scorer.share_prefix)
    return max(float(np.abs(scorer.score(batch)[0].numpy() - batch.logprobs).max()) for batch in batches)


# What shares a prompt. Gemma's images see themselves both ways, and so do not fit the mask of a tree.
SHARES = {name: name != "gemma3" for name in FAMILIES}


@pytest.mark.parametrize("share", [True, False], ids=["shared", "apart"])
@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_are_the_samplers(name: str, share: bool) -> None:
    scorer, samples = policy(name, share=share), sampled(name)
    assert scorer.share_prefix == (share and SHARES[name])
    for budget in (100_000, 300):  # all in one batch, and about one row in each
        assert largest_gap(scorer, samples, budget=budget) <= 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_k48_k70_batches_of_text_only_are_scored(name: str) -> None:
    (text, *others), scorer = sampled(name), policy(name)
    assert not text.media and all(sample.media for sample in others)
    assert largest_gap(scorer, [text], budget=1000) <= 1e-4
    assert largest_gap(scorer, [text, others[-1]], budget=100_000) <= 1e-4
    assert largest_gap(scorer, [others[-1], text], budget=100_000) <= 1e-4


def test_samples_of_one_prompt_compute_its_media_once() -> None:
    _, first, second, *_ = sampled("qwen3_vl")
    prompt = [placed.media for placed in first.media]
    (shared,) = pack([first, second], budget=10_000, share_prefix=True)
    assert shared.media == (*prompt, *(placed.media for placed in second.media[len(prompt) :]))
    (apart,) = pack([first, second], budget=10_000, share_prefix=False)
    assert len(apart.media) == len(shared.media) + len(prompt)
    patches = policy("qwen3_vl")._media_inputs(shared)["image_grid_thw"]
    assert len(patches) == sum(item.kind == "image" for item in shared.media)


def test_equal_ids_with_different_images_are_two_prompts() -> None:
    async def main() -> list[Played]:
        async with serving("qwen3_vl") as sampler:
            return await episodes("qwen3_vl", sampler, [[[image(1)]], [[image(2)]], [[image(1)]]])

    samples = [to_sample(played, number=number) for number, played in enumerate(play(main()))]
    prompts = [sample.token_ids[: sample.turn_spans[0][0]].tolist() for sample in samples]
    assert prompts[0] == prompts[1] == prompts[2]
    assert [row.members for row in build_rows(samples, budget=10_000, share_prefix=True)] == [(0, 2), (1,)]
    assert largest_gap(policy("qwen3_vl"), samples, budget=10_000) <= 1e-4


# Gradients and weights --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_reach_the_encoders(name: str) -> None:
    """Those of packed samples are those of each sample alone."""

    def gradients(share: bool, budget: int) -> dict[str, torch.Tensor]:
        model = families.fresh_model(name)
        scorer = policy(name, share=share, model=model)
        for batch in pack(sampled(name), budget=budget, share_prefix=scorer.share_prefix):
            scorer.score(batch)[0].sum().backward()
        return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}

    packed, alone = gradients(True, 100_000), gradients(False, 1)
    model = families.model(name)
    encoders = {id(parameter) for parameter in encoder_parameters(model)}
    within = [key for key, parameter in model.named_parameters() if id(parameter) in encoders]
    reached = [key for key in within if key in packed and packed[key].any()]
    assert len(reached) >= 0.9 * len(within), sorted(set(within) - set(reached))
    assert packed.keys() == alone.keys()
    for key, gradient in packed.items():
        torch.testing.assert_close(gradient, alone[key], atol=1e-3 * float(alone[key].abs().max()) + 1e-6, rtol=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_exported_models_are_the_same_when_loaded(name: str, tmp_path: Path) -> None:
    export_model(families.model(name), tmp_path, adapted=False)
    loaded = load_language_model(tmp_path, dtype=torch.float32).eval()
    assert largest_gap(policy(name, model=loaded), sampled(name), budget=100_000) <= 1e-4


def learner(name: str, **options: Any) -> TorchLearner:
    folder = families.folder(name)
    config = RunConfig.model_validate(
        {
            "model": {"name": str(folder)},
            "env": [{"id": "test/None-v0"}],
            "algorithm": {"name": "grpo"},
            "train": {"steps": 2, "groups_per_step": 1, "group_size": 5},
        }
    )
    context = RunContext(
        config=config,
        run_dir=folder,
        model_path=folder,
        tokenizer=families.renderer(name).tokenizer,
        processor=families.processor(name),
        never_sampled=tuple(families.renderer(name).never_sampled),
    )
    return TorchLearner(context, TorchLearnerOptions(dtype="float32", device="cpu", lr=1e-3, **options))


@pytest.mark.parametrize("options", [{}, {"freeze_encoders": True}, {"lora": {"rank": 2}}], ids=str)
def test_a_step_trains_encoders_unless_they_are_frozen(options: dict[str, Any], tmp_path: Path) -> None:
    trainer = learner("qwen3_vl", **options)
    before = {key: tensor.clone() for key, tensor in trainer.weights()}
    metrics = trainer.step(Batch(version=0, samples=sampled("qwen3_vl")))
    assert metrics["logprob_diff_mean"] <= 1e-4 and metrics["grad_norm"] > 0
    moved = {key for key, tensor in trainer.weights() if not torch.equal(tensor, before[key])}
    assert any("language_model" in key for key in moved)
    assert any("visual" in key for key in moved) == ("freeze_encoders" not in options)
    assert before.keys() == {key for key, _ in families.model("qwen3_vl").named_parameters()}

    trainer.export(tmp_path)
    scorer = policy("qwen3_vl", model=load_language_model(tmp_path, dtype=torch.float32).eval())
    for batch in pack(sampled("qwen3_vl"), budget=10_000, share_prefix=True):
        with torch.no_grad():
            torch.testing.assert_close(scorer.score(batch), trainer.policy.score(batch), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_all_linears_but_the_head_have_adapters(name: str) -> None:
    model = families.fresh_model(name)
    linears = {key for key, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    add_adapters(model, LoraOptions(rank=2), seed=0)
    adapted = {key.partition(".lora_A")[0] for key, _ in model.named_parameters() if ".lora_A." in key}
    assert adapted and linears - adapted == {"lm_head"}


# What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_k40_placeholders_without_media_are_refused(name: str) -> None:
    sample = sampled(name)[1]
    stripped = dataclasses.replace(sample, media=())
    (batch,) = pack([stripped], budget=10_000, share_prefix=True)
    with pytest.raises(TrainingError, match=r"image, video and audio tokens, but their media stand for 0"):
        policy(name).score(batch)


def test_k40_media_are_refused_by_a_model_of_text() -> None:
    (batch,) = pack([sampled("qwen3_vl")[1]], budget=10_000, share_prefix=True)
    scorer = policy("qwen3_vl")
    scorer.processor = None
    with pytest.raises(TrainingError, match="reads text only, but samples have <"):
        scorer.score(batch)
