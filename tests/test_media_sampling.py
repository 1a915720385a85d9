"""The local sampler with media: what it samples has the log-probs of a plain forward, whoever shares what with whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import families
import numpy as np
import pytest
import torch
from families import FAMILIES
from local_sampler_kit import play
from media_kit import READS, audio, image, make, plain_logits, user, video

from relax_gym.chat import Conversation
from relax_gym.errors import SamplerError
from relax_gym.media.items import Media
from relax_gym.sampler import SamplingParams
from relax_gym.types import Completion
from relax_gym_plugins.samplers.local.engine import LocalEngine
from relax_gym_plugins.samplers.local.options import LocalSamplerOptions
from relax_gym_plugins.samplers.local.sampler import LocalSampler
from relax_gym_trainers.torch_learner.model import plain_weights

pytestmark = pytest.mark.usefixtures("one_thread")

Plan = Sequence[Sequence[Media]]
Played = tuple[Conversation, list[tuple[int, Completion]]]


@asynccontextmanager
async def serving(name: str, *, sound: bool = False, **options: Any) -> AsyncIterator[LocalSampler]:
    renderer = families.renderer(name, sound_in_video=sound)
    engine = LocalEngine(
        families.fresh_model(name),
        renderer.tokenizer,
        LocalSamplerOptions(dtype="float32", **options),
        processor=renderer.processor,
    )
    sampler = LocalSampler.from_engine(engine)
    await sampler.start()
    try:
        yield sampler
    finally:
        await sampler.aclose()


async def episode(name: str, session: Any, plan: Plan, *, seed: int, tokens: int = 5, sound: bool = False) -> Played:
    """One turn for each list of items. Returns the conversation, and each completion with where it begins."""
    renderer = families.renderer(name, sound_in_video=sound)
    conversation, out = renderer.conversation(), []
    params = SamplingParams(
        max_new_tokens=tokens, seed=seed, logit_bias=renderer.never_sampled, stop_token_ids=renderer.stop_token_ids
    )
    for media in plan:
        conversation.observe([user("see ", *media, " now")])
        start = len(conversation.token_ids)
        completion = await session.generate(conversation.token_ids, params, conversation.media)
        conversation.complete(completion.token_ids)
        out.append((start, completion))
    return conversation, out


async def episodes(name: str, sampler: LocalSampler, plans: Sequence[Plan], **kwargs: Any) -> list[Played]:
    """Side by side, each with a seed of its own."""

    async def one(seed: int) -> Played:
        played = await episode(name, sessions[seed], plans[seed], seed=seed, **kwargs)
        sessions[seed].close()
        return played

    sessions = [sampler.open_session() for _ in plans]
    return list(await asyncio.gather(*map(one, range(len(plans)))))


def check(name: str, played: Sequence[Played], model: Any = None, *, sound: bool = False) -> None:
    """Reported log-probs are those of one plain forward of the whole conversation."""
    processor, gaps = families.processor(name, sound_in_video=sound), []
    for conversation, completions in played:
        media = [placed.media for placed in conversation.media]
        more = {"use_audio_in_video": True} if sound else {}
        logits = plain_logits(model or families.model(name), processor, conversation.token_ids, media, **more)
        logits[:, list(families.renderer(name).never_sampled)] = -torch.inf
        table = logits.double().log_softmax(-1)
        for start, completion in completions:
            at = torch.arange(start, start + len(completion.token_ids))
            expected = table[at - 1, torch.tensor(completion.token_ids)].numpy()
            gaps.append(np.abs(np.array(completion.logprobs) - expected))
    found = np.concatenate(gaps)
    assert found.mean() <= 1e-5 and found.max() <= 1e-4


def plans(name: str) -> list[Plan]:
    """None, some and all kinds, in the first turn, in later ones, in all; two sessions begin alike."""
    kinds = list(families.processor(name).tokens)
    every, other = [make(kind, 3) for kind in kinds], [make(kind, seed) for seed, kind in enumerate(kinds, 4)]
    return [[every, []], [every, other], [[], []], [[], other[-1:]], [[other[0], every[0]], every[-1:]]]


@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_are_those_of_a_plain_forward(name: str) -> None:
    async def main() -> list[Played]:
        async with serving(name) as sampler:
            return await episodes(name, sampler, plans(name))

    check(name, play(main()))


@pytest.mark.parametrize(("name", "kind"), [(n, kind) for n, kinds in READS.items() for kind in kinds])
def test_what_an_item_holds_matters(name: str, kind: str) -> None:
    """Or the tests of log-probs would say nothing about media."""
    processor, ends = families.processor(name), []
    for seed in (0, 3):
        item = make(kind, seed)
        ids = families.renderer(name).conversation().observe([user(item)]).context_ids
        ends.append(plain_logits(families.model(name), processor, ids, [item])[-1].log_softmax(-1))
    assert (ends[0] - ends[1]).abs().max() > 3e-3  # 30 times what they may be off


@pytest.mark.parametrize("name", FAMILIES)
def test_small_prefills_and_few_rows_change_nothing(name: str) -> None:
    """Prefills of about 24 tokens, contexts that lose their row to others, rows that are moved together."""

    async def main() -> list[Played]:
        async with serving(name, prefill_tokens=24, max_slots=3) as sampler:
            return await episodes(name, sampler, plans(name))

    check(name, play(main()))


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("name", ["qwen2_5_omni", "qwen3_omni"])
def test_k61_log_probs_after_sound_tracks_are_those_of_a_plain_forward(name: str) -> None:
    heard = [video(seed, sound=audio(seed, seconds=0.9)) for seed in range(2)]

    async def main() -> list[Played]:
        async with serving(name, sound=True, prefill_tokens=32) as sampler:
            return await episodes(name, sampler, [[heard[:1], []], [[], [image(), heard[1]]]], sound=True)

    check(name, play(main()), sound=True)


# Sharing ----------------------------------------------------------------------------------------------------------


def test_equal_prompts_with_equal_media_are_computed_once() -> None:
    """What stands after an image is never taken from a context with another image, though all ids are equal."""

    async def main() -> tuple[list[Played], list[int]]:
        played, cached = [], []
        async with serving("qwen3_vl", deterministic=False) as sampler:
            for item in (image(1), image(1), image(2)):
                played.append(await episode("qwen3_vl", sampler.open_session(), [[item]], seed=3))
                cached.append(int(sampler.metrics()["cached_tokens"]))
        return played, cached

    played, cached = play(main())
    check("qwen3_vl", played)
    prompts = [conversation.token_ids[: completions[0][0]] for conversation, completions in played]
    assert prompts[0] == prompts[1] == prompts[2]
    assert cached == [0, len(prompts[0]) - 1, played[2][0].media[0].start]
    first, same, other = (np.array(completions[0][1].logprobs) for _, completions in played)
    np.testing.assert_allclose(first, same, atol=1e-5)
    assert abs(first[0] - other[0]) > 1e-3


@pytest.mark.parametrize("name", FAMILIES)
def test_k39_new_weights_replace_all_that_was_computed_with_old_ones(name: str) -> None:
    """Each family's plain weights, tied ones once, are taken under their names; one session goes on over the update."""
    new = families.fresh_model(name)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    named = dict(plain_weights(new))
    assert len({tensor.data_ptr() for tensor in named.values()}) == len(named) == len(list(new.parameters()))
    plan = [[make(kind, 3) for kind in families.processor(name).tokens]]

    async def main() -> tuple[Played, Played]:
        async with serving(name) as sampler:
            session = sampler.open_session()
            before = await episode(name, session, plan, seed=1)
            await sampler.update_weights(named.items(), 7)
            after = await episode(name, session, plan, seed=1)
            assert sampler.version == 7
            return before, after

    before, after = play(main())
    check(name, [before])
    check(name, [after], new)
    (_, old), (_, fresh) = before[1][0], after[1][0]
    assert set(old.versions) == {-1} and set(fresh.versions) == {7}
    assert old.logprobs[0] != pytest.approx(fresh.logprobs[0], abs=1e-3)


# What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_k40_placeholders_without_media_are_refused_and_others_go_on(name: str) -> None:
    item = make(next(iter(families.processor(name).tokens)), 0)
    context = families.renderer(name).conversation().observe([user("see ", item)])

    async def main() -> Completion:
        params = SamplingParams(max_new_tokens=2)
        async with serving(name, deterministic=False) as sampler:
            session = sampler.open_session()
            with pytest.raises(SamplerError, match="placeholder tokens for 0 items that need 0"):
                await session.generate(context.context_ids, params)
            with pytest.raises(SamplerError, match="0 placeholder tokens for 1 items"):
                await session.generate(context.context_ids[:3], params, context.media)
            return await session.generate(context.context_ids, params, context.media)

    assert len(play(main()).token_ids) == 2


@pytest.mark.parametrize("name", FAMILIES)
def test_k44_placeholders_are_never_sampled(name: str) -> None:
    """200 tokens at a temperature at which all are about as likely; without the bias there would be some."""
    renderer = families.renderer(name)
    never = renderer.never_sampled

    async def main(bias: dict[int, float]) -> set[int]:
        ids = renderer.conversation().observe([user("go")]).context_ids
        async with serving(name, deterministic=False) as sampler:
            sessions = [sampler.open_session() for _ in range(8)]
            params = [
                SamplingParams(max_new_tokens=25, seed=seed, temperature=20.0, logit_bias=bias) for seed in range(8)
            ]
            found = await asyncio.gather(*(s.generate(ids, p) for s, p in zip(sessions, params, strict=True)))
        return {token for completion in found for token in completion.token_ids}

    assert not play(main(never)) & never.keys()
    assert play(main({})) & never.keys()
