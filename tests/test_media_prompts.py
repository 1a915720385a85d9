"""Media in prompts: which item stands where over the turns, what only looks like one, and what is refused by name."""

from __future__ import annotations

import json
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
from families import FAMILIES
from media_kit import audio, converse, image, items, make, said, user, video

from relax_gym.build import build_renderer
from relax_gym.chat import ChatRenderer
from relax_gym.config import ChatConfig, parse_config
from relax_gym.errors import MediaError, ModelError, TemplateError
from relax_gym.media import Video
from relax_gym.models import load_tokenizer
from relax_gym.processing import MediaProcessor
from relax_gym.trajectory import to_samples
from relax_gym.types import Completion, FinishReason, Placed, StopReason, Task, Trajectory, Turn
from relax_gym_trainers.torch_learner.packing import pack

pytestmark = pytest.mark.usefixtures("one_thread")

OMNI = ("qwen2_5_omni", "qwen3_omni")
AXES = ("qwen2_5_vl", "qwen3_vl", *OMNI)


def first_kind(name: str) -> str:
    return next(iter(families.processor(name).tokens))


# Which item stands where ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_k56_k57_each_turn_knows_the_media_of_all_turns_so_far_in_order(name: str) -> None:
    renderer, processor = families.renderer(name), families.processor(name)
    shown = [make(first_kind(name), seed) for seed in range(4)]
    turns = [[shown[0]], [], [shown[1], shown[2]], [shown[0], shown[3]]]
    conversation, expected = renderer.conversation(), []
    for turn in turns:
        context = conversation.observe([user("see ", *turn), user("and say", role="tool")])
        assert [placed.media for placed in context.media] == turn
        expected += turn
        assert [placed.media for placed in conversation.media] == expected
        conversation.complete(renderer.encode_answer("well"))
    ids = np.array(conversation.token_ids)
    holders = np.isin(ids, processor.placeholder_ids)
    for placed in conversation.media:
        inside = holders[placed.start : placed.end]
        assert inside[0] and inside[-1] and inside.sum() == processor.features(placed.media).placeholders
    assert sum(processor.features(item).placeholders for item in expected) == holders.sum()
    assert conversation.media[0].media is conversation.media[3].media


def test_k57_equal_items_are_processed_once() -> None:
    processor = MediaProcessor(families.processor("qwen3_vl").processor)
    assert processor.features(image(1)) is processor.features(image(1))
    assert processor.features(image(1)) is not processor.features(image(2))
    assert image(1).digest == image(1).digest != image(2).digest


def test_only_large_tensors_are_dropped_while_an_item_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = MediaProcessor(families.processor("qwen3_vl").processor, cache_bytes=0)
    process, processed = processor._process, []
    monkeypatch.setattr(processor, "_process", lambda media: processed.append(media) or process(media))
    renderer = ChatRenderer(load_tokenizer(families.folder("qwen3_vl")), processor=processor)
    shown = [image(seed) for seed in range(3)]
    conversations = [converse(renderer, [user("see ", *shown), said("well")]) for _ in range(2)]
    assert processed == shown
    ids = np.array(conversations[0].token_ids)
    positions = processor.positions(families.model("qwen3_vl"), ids, shown)
    assert processed == shown
    kept = families.processor("qwen3_vl")
    assert np.array_equal(positions, kept.positions(families.model("qwen3_vl"), ids, shown))
    assert torch.equal(processor.inputs(shown)["pixel_values"], kept.inputs(shown)["pixel_values"])
    assert processed == [*shown, *shown]


def test_what_is_known_does_not_wait_for_what_is_processed() -> None:
    processor = MediaProcessor(families.processor("qwen3_vl").processor)
    known, inner = image(1), processor.processor
    text = processor.features(known).text
    begun, read = threading.Event(), threading.Event()

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            begun.set()
            assert read.wait(60)
            return inner(*args, **kwargs)

    processor.processor = Slow()
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(processor.features, image(2))
        begun.wait()
        assert processor.expand(processor.tokens["image"], [known]) == text
        assert processor.features(known).text == text
        read.set()
        assert other.result().placeholders


@pytest.mark.parametrize("name", FAMILIES)
def test_sampler_learner_and_conversation_count_the_same_tokens(name: str) -> None:
    renderer, processor = families.renderer(name), families.processor(name)
    conversation, turns = renderer.conversation(), []
    for seed in range(3):
        context = conversation.observe([user("see ", *(make(kind, seed) for kind in processor.tokens), " now")])
        answer = renderer.encode_answer("yes")
        conversation.complete(answer)
        completion = Completion(
            token_ids=answer,
            logprobs=(-1.0,) * len(answer),
            versions=(0,) * len(answer),
            finish_reason=FinishReason.STOP,
        )
        turns.append(
            Turn(
                observation=(),
                context_ids=context.context_ids,
                media=context.media,
                completion=completion,
                text="yes",
                action="yes",
                reward=0.0,
            )
        )
    task, end = Task(env_id="test/None-v0", seed=0), StopReason.ENV_DONE
    (sample,) = to_samples(Trajectory(task=task, episode_id="e", turns=tuple(turns), stop_reason=end), "g")
    assert sample.media == tuple(conversation.media)
    assert sample.token_ids.tolist() == conversation.token_ids
    for share in (True, False):
        (batch,) = pack([sample], budget=100_000, share_prefix=share)
        assert batch.media == tuple(placed.media for placed in conversation.media)
        present = np.isin(batch.ids, processor.placeholder_ids).sum()
        assert present == sum(processor.features(item).placeholders for item in batch.media)
    assert processor.place(sample.token_ids, [placed.media for placed in sample.media]) == sample.media


# Positions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", AXES)
def test_k53_positions_of_a_truncated_sequence_are_those_of_its_beginning(name: str) -> None:
    processor, model = families.processor(name), families.model(name)
    kinds = list(processor.tokens)
    messages = [
        user("see ", make(kinds[0], 0), " and ", make(kinds[-1], 1)),
        said("an answer"),
        user(make(kinds[0], 2)),
        said("no"),
    ]
    made = converse(families.renderer(name), messages)
    whole = processor.positions(model, np.array(made.token_ids), items(messages))
    assert whole.shape == (3, len(made.token_ids))
    assert whole.max() < len(made.token_ids) and len(np.unique(whole[0])) < len(made.token_ids)
    for count, placed in enumerate(made.media):
        for length in (placed.start - 3, placed.start - 1):
            ids = np.array(made.token_ids[:length])
            found = processor.positions(model, ids, items(messages)[:count])
            np.testing.assert_array_equal(np.broadcast_to(found, (3, length)), whole[:, :length])


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("order", [(True, False), (False, True), (True, False, True)], ids=str)
@pytest.mark.parametrize("name", OMNI)
def test_k61_videos_with_and_without_sound_in_one_conversation(name: str, order: tuple[bool, ...]) -> None:
    """Each item's positions are those it has in a conversation of its own, moved to where the last one ended."""
    processor, renderer = families.processor(name, sound_in_video=True), families.renderer(name, sound_in_video=True)
    model = families.model(name)
    clips = [video(n, frames=4, sound=audio(n, 0.9) if sounded else None) for n, sounded in enumerate(order)]
    text = "".join("<|vision_bos|>" + processor.features(clip).text + "<|vision_eos|>see" for clip in clips)
    pieces = [
        np.array(renderer.template.encode("<|vision_bos|>" + processor.features(clip).text + "<|vision_eos|>see"))
        for clip in clips
    ]
    expected, offset = [], 0
    for piece, clip in zip(pieces, clips, strict=True):
        expected.append(processor.positions(model, piece, [clip]) + offset)
        offset = int(expected[-1].max()) + 1
    found = processor.positions(model, np.array(renderer.template.encode(text)), clips)
    np.testing.assert_array_equal(found, np.concatenate(expected, axis=1))


@pytest.mark.parametrize(("name", "size"), [("qwen2_5_vl", 8), ("qwen3_vl", 16)])
def test_k50_tokens_follow_the_processors_patch_size(name: str, size: int) -> None:
    """A token is 2 x 2 patches."""
    found = families.processor(name).features(image(height=4 * size, width=6 * size))
    assert found.placeholders == 2 * 3
    assert found.tensors["pixel_values"].shape == (4 * 6, 3 * 2 * size * size)


# What only looks like media ---------------------------------------------------------------------------------------


def marks(name: str) -> str:
    """Every special token and every placeholder as text."""
    processor, tokenizer = families.processor(name), families.renderer(name).tokenizer
    return "".join([*processor.tokens.values(), *tokenizer.all_special_tokens, *tokenizer.get_added_vocab()])


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("name", FAMILIES)
def test_text_that_spells_special_tokens_is_text(name: str, role: str) -> None:
    renderer, processor = families.renderer(name), families.processor(name)
    typed, item = marks(name), make(first_kind(name), 0)
    special = set(renderer.tokenizer.added_tokens_decoder)
    plain = renderer.conversation().observe([user("go"), user("see ", item, " !", role=role)])
    spelled = renderer.conversation().observe([user("go"), user(f"{typed}see ", item, f" {typed}!", role=role)])
    assert [id for id in spelled.context_ids if id in special] == [id for id in plain.context_ids if id in special]
    assert processor.features(item).text in renderer.template.decode(spelled.context_ids)
    assert renderer.template.decode(spelled.context_ids).count(typed) == 2
    (placed,) = spelled.media
    assert placed.media == item


def test_text_that_spells_our_own_marks_is_text() -> None:
    item = make("image", 0)
    context = families.renderer("qwen3_vl").conversation().observe([user("\ufdd2image\ufdd2 see ", item)])
    assert [placed.media for placed in context.media] == [item]


@pytest.mark.parametrize("name", FAMILIES)
def test_text_that_spells_special_tokens_stays_text_when_the_past_is_rendered_anew(name: str) -> None:
    """A template that drops the thinking of past answers makes a new segment of the whole conversation."""
    tokenizer = load_tokenizer(families.folder(name))
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ message.content }}", "{{ message.content.split('</think>')[-1] }}"
    )
    renderer = ChatRenderer(tokenizer, processor=families.processor(name))
    typed, shown = marks(name), [make(first_kind(name), seed) for seed in range(2)]
    conversation = renderer.conversation()
    conversation.observe([user(typed, shown[0])])
    conversation.complete(renderer.encode_answer("<think>so</think>plain"))
    context = conversation.observe([user("again ", shown[1], typed)])
    assert context.new_segment and [placed.media for placed in context.media] == shown
    assert renderer.template.decode(context.context_ids).count(typed) == 2


# What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_k40_placeholders_and_media_must_match(name: str) -> None:
    processor, renderer = families.processor(name), families.renderer(name)
    item = make(first_kind(name), 0)
    made = renderer.conversation().observe([user("see ", item)])
    needed = processor.features(item).placeholders
    with pytest.raises(MediaError, match=f"{needed} placeholder tokens for 0 items that need 0"):
        processor.place(made.context_ids, [])
    with pytest.raises(MediaError, match=f"{needed} placeholder tokens for 2 items that need {2 * needed}"):
        processor.place(made.context_ids, [item, item])
    with pytest.raises(TemplateError, match="the chat template shows"):
        processor.expand(next(iter(processor.tokens.values())), [item, item])


def test_k52_outputs_that_no_one_knows_are_refused_by_name() -> None:
    known: Any = families.processor("qwen3_vl").processor

    class Newer(type(known)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            out = super().__call__(*args, **kwargs)
            out["depth_map"] = torch.zeros(1)
            return out

    newer = Newer(known.image_processor, known.tokenizer, known.video_processor, chat_template=known.chat_template)
    with pytest.raises(ModelError, match="Newer gives depth_map, which relax-gym cannot hand to the model"):
        MediaProcessor(newer).features(image())


@pytest.mark.parametrize(
    ("name", "item"), [("qwen2_audio", image()), ("gemma3", audio()), ("idefics3", video())], ids=str
)
def test_kinds_that_a_model_does_not_read_are_refused_by_name(name: str, item: Any) -> None:
    with pytest.raises(MediaError, match=f"reads {first_kind(name)}, not {item.kind}"):
        families.processor(name).features(item)
    with pytest.raises(TemplateError, match=f"a user message has {item.kind}"):
        families.renderer(name).conversation().observe([user(item)])


def test_sound_tracks_are_heard_by_models_that_hear_only() -> None:
    silent, sounded = video(), video(sound=audio())
    processor = families.processor("qwen3_vl", sound_in_video=True)
    assert processor.features(sounded).text == processor.features(silent).text


# What a model must not say ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_k44_placeholders_are_never_sampled(name: str) -> None:
    renderer, processor = families.renderer(name), families.processor(name)
    assert set(processor.placeholder_ids.tolist()) <= renderer.never_sampled.keys()
    assert set(renderer.never_sampled.values()) == {-np.inf}
    assert not renderer.never_sampled.keys() & set(renderer.stop_token_ids)
    plain = set(renderer.template.encode("any text\n"))
    assert not renderer.never_sampled.keys() & plain


def test_spans_move_with_their_turn() -> None:
    assert Placed(media=image(), start=2, end=5).moved(3) == Placed(media=image(), start=5, end=8)


@pytest.mark.parametrize("name", ["qwen2_audio", "qwen2_5_omni"])
def test_k59_a_sound_whose_end_would_be_cut_off_is_refused(name: str) -> None:
    processor = families.processor(name)
    assert processor.features(audio(seconds=1.0)).placeholders == 25
    with pytest.raises(MediaError, match=r"^<audio 1.50 s at \d+ Hz \w+> is longer than the 1 s that Qwen2"):
        processor.features(audio(seconds=1.5))


def test_a_video_of_too_many_tokens_loses_frames() -> None:
    processor = families.processor("qwen2_5_vl")
    clip = video(frames=8)
    tokens = processor.features(clip).placeholders
    fitted = processor.fitted(clip, tokens // 2)
    assert isinstance(fitted, Video)
    assert (len(fitted.frames), processor.features(fitted).placeholders) == (4, tokens // 2)
    assert (fitted.times[0], fitted.times[-1]) == (clip.times[0], clip.times[-1])
    assert processor.fitted(clip, tokens) is clip
    with pytest.raises(MediaError, match=r"one frame of <video 1 frames .* is 4 tokens, media.video_max_tokens = 3"):
        processor.fitted(clip, 3)


# Templates --------------------------------------------------------------------------------------------------------


def test_a_chat_template_that_only_the_processor_has_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(families.folder("qwen2_audio"), folder)
    template = folder / "chat_template.jinja"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template.read_text()}))
    template.unlink()
    assert not load_tokenizer(folder).chat_template
    config = parse_config(
        {
            "model": {"name": str(folder)},
            "env": [{"id": "relax_gym/GuessNumber-v0"}],
            "train": {"steps": 1, "groups_per_step": 1, "group_size": 2},
        }
    )
    shown = [user("hear ", make("audio", 0))]
    own = families.renderer("qwen2_audio").conversation()
    assert build_renderer(config, folder).conversation().observe(shown) == own.observe(shown)


def test_media_that_a_template_numbers_are_numbered_over_all_turns() -> None:
    template = (
        "{% set ns = namespace(seen=0) %}{% for m in messages %}<|im_start|>{{ m.role }}: {% if m.content is string %}"
        "{{ m.content }}{% else %}{% for part in m.content %}{% if part.type == 'image' %}"
        "{% set ns.seen = ns.seen + 1 %}Picture {{ ns.seen }}: "
        "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
        "{% endfor %}{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
    )
    tokenizer, processor = load_tokenizer(families.folder("qwen3_vl")), families.processor("qwen3_vl")
    renderer = ChatRenderer(tokenizer, ChatConfig(template=template), processor=processor)
    messages = [user(image(0), image(1)), said("two"), user(image(2), "?"), said("three"), user(image(3)), said("four")]
    conversation = converse(renderer, messages)
    text = renderer.decode(conversation.token_ids)
    assert [int(number) for number in re.findall(r"Picture (\d)", text)] == [1, 2, 3, 4]
    assert conversation.new_segments == 0
