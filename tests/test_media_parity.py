"""Rendered turn by turn, a conversation is what the family's own processor makes of it as a whole: ids and tensors."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

import families
import numpy as np
import pytest
import torch
from families import FAMILIES
from media_kit import READS, audio, converse, image, items, make, said, single_pass, user, video

from relax_gym.errors import MediaError
from relax_gym.media.items import Media, Video
from relax_gym.processing import MediaProcessor
from relax_gym.types import Message

pytestmark = pytest.mark.usefixtures("one_thread")

OMNI = ("qwen2_5_omni", "qwen3_omni")
NUMPY_COPY = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # in transformers
TURNS = [(0,), (1,), (2,), (3,), (1, 0, 2), (0, 1, 1), (1, 1, 1)]


def conversation(turns: Sequence[Sequence[Media]], *, role: str = "user") -> list[Message]:
    """A user's message and an answer for each turn; later ones have `role`."""
    out: list[Message] = []
    for index, media in enumerate(turns):
        pieces = [piece for number, item in enumerate(media) for piece in (f"see {number} ", item)]
        out += [user(*pieces, " now", role=role if index else "user"), said(f"fine {index}")]
    return out


def spread(kinds: Sequence[str], counts: Sequence[int], *, step: int = 1) -> list[list[Media]]:
    """So many items for each turn, kinds and sizes in rotation; sizes are equal with `step` 3."""
    first = np.cumsum([0, *counts])
    return [
        [make(kinds[at % len(kinds)], at * step) for at in range(start, start + count)]
        for start, count in zip(first, counts, strict=False)
    ]


def rope_index(model: Any, ids: torch.Tensor, out: dict[str, Any], *, sound: bool = False) -> torch.Tensor:
    """Positions [3, L] by the model's own function."""
    compute = MediaProcessor.rope_index(model)
    mask = out.get("feature_attention_mask")
    given = {
        **out,
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "second_per_grids": None if (seconds := out.get("video_second_per_grid")) is None else torch.as_tensor(seconds),
        "audio_seqlens": None if mask is None else mask.sum(-1),
        "use_audio_in_video": sound,
    }
    wanted = {k: v for k, v in given.items() if k in inspect.signature(compute).parameters and v is not None}
    positions: torch.Tensor = compute(**wanted)[0][:, 0]
    return positions


def check(name: str, messages: Sequence[Message], *, sound: bool = False) -> None:
    """Ids, tensors and positions of both ways are equal."""
    renderer, processor = families.renderer(name, sound_in_video=sound), families.processor(name, sound_in_video=sound)
    made, whole, media = (
        converse(renderer, messages),
        single_pass(processor.processor, messages, sound=sound),
        items(messages),
    )
    length = len(made.token_ids)
    assert made.token_ids == whole["input_ids"][0, :length].tolist()
    assert renderer.decode(whole["input_ids"][0, length:].tolist()).strip() == "", (
        "nothing but the template's line end is left"
    )
    assert [placed.media for placed in made.media] == media
    inputs = processor.inputs(media)
    assert inputs.keys() == {
        k for k in whole if k not in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
    }
    for key, tensor in inputs.items():
        compare(key, tensor, whole)
    if processor.rope_index(families.model(name)) is not None and media:
        expected = rope_index(families.model(name), whole["input_ids"], whole, sound=sound)[:, :length].numpy()
        found = processor.positions(families.model(name), np.array(made.token_ids), media)
        assert found.shape == (3, length)
        np.testing.assert_array_equal(found, expected)


def compare(key: str, tensor: torch.Tensor, whole: dict[str, Any]) -> None:
    """Equal where the model looks. A single pass pads an audio clip with silence to the length of its longest neighbour
    before it computes features, so its last two frames depend on the neighbour; ours do not."""
    expected = torch.as_tensor(whole[key])
    if key == "input_features" and len(tensor) > 1:
        heard = whole["feature_attention_mask"].roll(-2, 1)[:, None].bool()
        heard[..., -2:] = False
        tensor, expected = tensor * heard, expected * heard
    if tensor.ndim == 5 or key == "pixel_attention_mask":
        expected = expected.reshape(tensor.shape)  # frames of several videos: rows of a batch there, of one row here
    assert tensor.shape == expected.shape, key
    torch.testing.assert_close(tensor, expected.to(tensor.dtype), atol=1e-6, rtol=0, msg=key)


def test_every_family_reads_what_it_is_listed_with() -> None:
    assert {name: tuple(families.processor(name).tokens) for name in FAMILIES} == READS


@pytest.mark.parametrize("counts", TURNS, ids=str)
@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in READS.items() for kind in kinds])
def test_turn_by_turn_is_a_single_pass(name: str, kind: str, counts: Sequence[int]) -> None:
    # A single pass of SmolVLM's processor tells the model of each video that it has as many frames as the longest.
    step = 3 if (name, kind) == ("smolvlm", "video") else 1
    check(name, conversation(spread([kind], counts, step=step)))


# SmolVLM's processor gives images and videos under one name, of which a single pass keeps one.
MIXED = [name for name, kinds in READS.items() if len(kinds) > 1 and name != "smolvlm"]


@pytest.mark.parametrize("counts", [(3,), (1, 1, 1), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("name", MIXED)
def test_kinds_may_be_mixed_in_any_turn(name: str, counts: Sequence[int]) -> None:
    check(name, conversation(spread(READS[name], counts)))


@pytest.mark.parametrize("name", FAMILIES)
def test_media_may_come_from_tools(name: str) -> None:
    check(name, conversation(spread(READS[name][:1], (1, 2, 0)), role="tool"))


# Audio ------------------------------------------------------------------------------------------------------------

# Tokens of a clip of so many seconds, for a model that hears 30 s at a time. Frames are 10 ms; the one after 30 s is
# cut by the feature extractors of Qwen2-Audio and Qwen2.5-Omni, not by that of Qwen3-Omni.
SECONDS = (0.1, 1.0, 29.99, 30.0, 30.01)
TOKENS = {
    "qwen2_audio": (2, 25, 750, 750, 750),
    "qwen2_5_omni": (2, 25, 750, 750, 750),
    "qwen3_omni": (2, 13, 390, 390, 391),
}


@pytest.mark.parametrize("name", TOKENS)
def test_k59_audio_has_as_many_tokens_as_its_encoder_makes(name: str) -> None:
    parts = FAMILIES[name](30)
    processor, model = MediaProcessor(parts.processor), parts.model(parts.config).eval()
    clips = [audio(seconds=seconds) for seconds in SECONDS]
    features = [processor.features(clip) for clip in clips]
    assert tuple(feature.placeholders for feature in features) == TOKENS[name]
    with torch.no_grad():
        for feature in features:
            ids = torch.tensor([processor.processor.tokenizer(feature.text)["input_ids"]])
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **feature.tensors).logits
            assert logits.shape[1] == feature.placeholders


@pytest.mark.parametrize("name", TOKENS)
def test_k59_audio_too_short_to_be_heard_is_refused(name: str) -> None:
    with pytest.raises(MediaError, match=r"makes no token|cannot process"):
        families.processor(name).features(audio(seconds=0.005))


@pytest.mark.parametrize("name", ["qwen2_audio", "qwen2_5_omni"])
def test_audio_whose_end_would_be_cut_off_is_refused(name: str) -> None:
    """These hear 1 s."""
    with pytest.raises(MediaError, match=r"1.50 s.* is longer than the 1 s that .* takes at a time"):
        families.processor(name).features(audio(seconds=1.5))


@NUMPY_COPY
def test_k61_sound_tracks_whose_end_would_be_cut_off_are_refused() -> None:
    processor, clip = families.processor("qwen2_5_omni", sound_in_video=True), video(sound=audio(seconds=1.5))
    with pytest.raises(MediaError, match=r"1.50 s.* is longer than the 1 s that .* takes at a time"):
        processor.features(clip)


# Video ------------------------------------------------------------------------------------------------------------

WATCHES = [name for name, kinds in READS.items() if "video" in kinds]


@pytest.mark.parametrize("name", WATCHES)
def test_k64_videos_of_one_to_eight_frames(name: str) -> None:
    """Frames are seen in pairs, of which an odd last one is its own; SmolVLM has 4 tokens for each."""
    processor, found = families.processor(name), []
    for frames in range(1, 9):
        clip = video(frames=frames)
        if (name, frames) != ("qwen3_vl", 1):
            check(name, conversation([[clip]]))
        found.append(processor.features(clip).placeholders)
    per_pair = processor.features(video(frames=2)).placeholders
    expected = [4 * n for n in range(1, 9)] if name == "smolvlm" else [per_pair * n for n in (1, 1, 2, 2, 3, 3, 4, 4)]
    assert found == expected


@pytest.mark.parametrize("fps", [0.5, 3.0])
@pytest.mark.parametrize("name", WATCHES)
def test_k58_frame_rates_reach_the_positions(name: str, fps: float) -> None:
    check(name, conversation([[video(frames=6, fps=fps)], [video(1, frames=6, fps=fps)]]))


def test_k58_times_between_two_positions_are_kept() -> None:
    """3 frames a second, 13 positions: pairs are 8 2/3 positions apart."""
    clip, processor = video(frames=6, fps=3.0), families.processor("qwen3_omni")
    ids = np.array(families.renderer("qwen3_omni").conversation().observe([user(clip)]).context_ids)
    times = np.unique(
        processor.positions(families.model("qwen3_omni"), ids, [clip])[0][np.isin(ids, processor.placeholder_ids)]
    )
    np.testing.assert_allclose(np.diff(times), 26 / 3, rtol=1e-6)


def test_k64_a_single_frame_is_shown_twice_to_a_processor_that_wants_two() -> None:
    processor, one = families.processor("qwen3_vl"), video(frames=1)
    two = Video(
        frames=one.frames.repeat(2, axis=0), times=np.zeros(2), indices=np.array([0, 0]), total_frames=5, duration=0.5
    )
    assert processor.features(one).text == processor.features(two).text
    assert processor.features(one).text.startswith("<0.0 seconds>")
    torch.testing.assert_close(dict(processor.features(one).tensors), dict(processor.features(two).tensors))


def test_k58_times_of_frames_reach_the_model() -> None:
    """4 frames at 2 a second: pairs at 0.25 s and 1.25 s, one each second."""
    clip = video(frames=4, fps=2.0)
    text = families.processor("qwen3_vl").features(clip).text
    assert re.findall("<([0-9.]+) seconds>", text) == ["0.2", "1.2"]  # 0.25 rounds to even
    assert families.processor("qwen2_5_vl").features(clip).tensors["second_per_grid_ts"].tolist() == [1.0]
    for name in OMNI:
        assert families.processor(name).features(clip).tensors["video_second_per_grid"].tolist() == [1.0]
    assert re.findall("from ([0-9:]+):", families.processor("smolvlm").features(clip).text) == [
        "00:00",
        "00:00",
        "00:01",
        "00:01",
    ]


def test_k58_times_of_a_variable_frame_rate_reach_the_model() -> None:
    """Frames at 0, 0.1, 3 and 5 s of a 6 s video of 90 frames."""
    still = video(frames=4)
    times = np.array([0.0, 0.1, 3.0, 5.0])
    clip = Video(frames=still.frames, times=times, indices=np.array([0, 3, 40, 60]), total_frames=90, duration=6.0)
    text = families.processor("qwen3_vl").features(clip).text
    assert re.findall("<([0-9.]+) seconds>", text) == ["0.1", "4.0"]
    assert re.findall("from ([0-9:]+):", families.processor("smolvlm").features(clip).text) == [
        "00:00",
        "00:00",
        "00:03",
        "00:05",
    ]
    for name in OMNI:
        assert families.processor(name).features(clip).tensors["video_second_per_grid"].tolist() == [3.0]
    assert families.processor("qwen2_5_vl").features(clip).tensors["second_per_grid_ts"].tolist() == [3.0]


@NUMPY_COPY
@pytest.mark.parametrize("name", OMNI)
@pytest.mark.parametrize("seconds", [0.3, 2.0, 4.5])
def test_k61_sound_tracks_are_interleaved_as_in_a_single_pass(name: str, seconds: float) -> None:
    parts = FAMILIES[name](30)
    heard = MediaProcessor(parts.processor, sound_in_video=True)
    clip = video(frames=round(2 * seconds) or 1, sound=audio(seconds=seconds))
    ids = parts.processor.tokenizer(heard.features(clip).text)["input_ids"]
    kinds = heard.token_types(np.array(ids))
    silent = video(frames=round(2 * seconds) or 1)
    assert clip.audio is not None
    assert (kinds == 2).sum() == heard.features(silent).placeholders
    assert (kinds == 3).sum() == heard.features(clip.audio).placeholders
    assert heard.features(clip).placeholders == ((kinds == 2) | (kinds == 3)).sum()


@NUMPY_COPY
@pytest.mark.parametrize("name", OMNI)
def test_k61_conversations_with_sound_tracks_are_a_single_pass(name: str) -> None:
    clips = [video(seed, frames=2, sound=audio(seed + 9, seconds=0.9)) for seed in range(3)]
    check(name, conversation([[clips[0]], [image(3), clips[1]], [], [audio(4), clips[2]]]), sound=True)
