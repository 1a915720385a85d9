"""What is sent of images, sounds and videos, without a server."""

from __future__ import annotations

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import av
import families
import numpy as np
import PIL.Image
import pytest
import soundfile
from media_kit import audio, image, user

from relax_gym.chat import Conversation
from relax_gym.config import RunConfig
from relax_gym.context import RunContext
from relax_gym.errors import SamplerError
from relax_gym.media.items import Media, Video
from relax_gym_plugins.samplers.sglang import wire_video
from relax_gym_plugins.samplers.sglang.engine import Engine, Features
from relax_gym_plugins.samplers.sglang.options import SGLangSamplerOptions
from relax_gym_plugins.samplers.sglang.protocol import BadReply
from relax_gym_plugins.samplers.sglang.sampler import SGLangSampler
from relax_gym_plugins.samplers.sglang.wire_media import WireMedia, check_prompt


def engine(version: tuple[int, ...] = (0, 5, 23), **config: Any) -> Engine:
    made = Engine("http://there")
    made.info = {"mm_process_config": {"video": config or wire_video.ARGUMENTS["mm_process_config"]["video"]}}
    made.features = Features(version=version, update_session=True, loads=True)
    return made


def wire(name: str, server: Engine | None = None, model_type: str | None = None) -> WireMedia:
    return WireMedia(
        model_type or name, families.renderer(name).tokenizer, families.processor(name), lambda: [server or engine()]
    )


def observed(name: str, *content: str | Media) -> Conversation:
    conversation = families.renderer(name).conversation()
    conversation.observe([user(*content)])
    return conversation


def clip(count: int = 4, height: int = 28, width: int = 56, *, fps: float = 2.0) -> Video:
    return Video(
        frames=np.random.default_rng(0).integers(0, 256, (count, height, width, 3), dtype=np.uint8),
        times=np.arange(count) / fps,
        indices=np.arange(count) * 5,
        total_frames=count * 5,
        duration=count / fps,
    )


def ask(name: str, *content: str | Media, made: WireMedia | None = None) -> tuple[str, dict[str, Any]]:
    """The text of what is sent, and the media."""
    conversation = observed(name, *content)
    ids, body = asyncio.run((made or wire(name)).request(conversation.token_ids, conversation.media))
    return families.renderer(name).tokenizer.decode(ids), body


def opened(uri: str) -> io.BytesIO:
    return io.BytesIO(base64.b64decode(uri.partition(",")[2]))


def test_images_and_sounds_lose_nothing() -> None:
    picture, sound = image(1), audio(2)
    text, body = ask("qwen2_5_omni", "a ", picture, sound, " b ", image(2))
    assert text.count("<|IMAGE|>") == 2 and text.count("<|AUDIO|>") == 1
    assert len(body["image_data"]) == 2
    np.testing.assert_array_equal(np.array(PIL.Image.open(opened(body["image_data"][0]))), picture.pixels)
    samples, rate = soundfile.read(opened(body["audio_data"][0]), dtype="float32")
    assert rate == sound.rate
    np.testing.assert_array_equal(samples, sound.samples)


def test_text_is_left_alone() -> None:
    assert asyncio.run(wire("qwen3_vl").request([5, 6], ())) == ([5, 6], {})


@pytest.mark.parametrize(("count", "fps"), [(1, 2.0), (2, 29.97), (4, 0.1), (5, 2.0), (4, 1 / 3600)])
def test_videos_travel_two_frames_at_a_time_with_their_times(count: int, fps: float) -> None:
    video = clip(count, fps=fps)
    text, body = ask("qwen3_vl", "a ", video, " b")
    pads = "<|video_pad|>" * ((count + 1) // 2)
    assert f"a <|vision_start|>{pads}<|vision_end|> b" in text
    frames, said = [], wire_video.TIME.findall(families.processor("qwen3_vl").features(video).text)
    for uri, (seconds, tenth) in zip(body["video_data"], said, strict=True):
        with av.open(opened(uri), "r") as container:
            rate = container.streams.video[0].average_rate
            frames += [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert rate is not None and f"{float(1 / rate) / 2:.1f}" == f"{seconds}.{tenth}"
    np.testing.assert_array_equal(frames[:count], video.frames)
    assert len(frames) == count + count % 2 and (frames[-1] == video.frames[-1]).all()


@pytest.mark.parametrize(
    ("server", "video", "says"),
    [
        (engine((0, 5, 22)), clip(), "too old for videos; upgrade to SGLang 0.5.23"),
        (engine(), clip(height=32), "multiples of 28"),
        (engine(fps=1), clip(), "--mm-process-config"),
        (engine(nframes=8), clip(), "sets nframes of videos; remove that"),
        (engine(), clip(64, 56, 56), "for all its frames together"),
    ],
)
def test_videos_that_a_server_would_read_otherwise_are_refused(server: Engine, video: Video, says: str) -> None:
    with pytest.raises(SamplerError, match=says):
        ask("qwen3_vl", video, made=wire("qwen3_vl", server))


def test_frames_of_the_size_servers_take_by_default_are_sent() -> None:
    assert wire_video.refusal((2, 280, 364, 3), {"mm_process_config": None}) is None
    assert wire_video.refusal((2, 28, 56, 3), {}) is not None
    assert wire_video.refusal((2, 1120, 1120, 3), {}) is not None


def test_families_that_servers_read_otherwise_are_refused() -> None:
    with pytest.raises(SamplerError, match="does not read videos for qwen2_5_vl"):
        ask("qwen2_5_vl", clip())
    with pytest.raises(SamplerError, match="also hears the silence"):
        ask("qwen2_audio", audio())


def test_prompts_that_servers_would_encode_otherwise_are_refused() -> None:
    """Only with sounds and videos: what images stand in is never encoded anew."""
    tokenizer = families.renderer("qwen3_vl").tokenizer
    pieces = [tokenizer.convert_tokens_to_ids(piece) for piece in "user"]  # one token when encoded

    def ids(item: Media) -> list[int]:
        conversation = observed("qwen3_vl", item)
        made = wire("qwen3_vl").request([*conversation.token_ids, *pieces], conversation.media)
        return asyncio.run(made)[0]

    assert ids(image())[-4:] == pieces
    with pytest.raises(SamplerError, match="encodes the text of prompts with sounds or videos anew"):
        ids(clip())


def test_attached_servers_that_may_keep_what_older_weights_saw_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = families.folder("qwen3_vl")
    config = RunConfig.model_validate(
        {
            "model": {"name": str(path)},
            "env": [{"id": "test/None-v0"}],
            "algorithm": {"name": "grpo"},
            "train": {"steps": 1, "groups_per_step": 1, "group_size": 2},
        }
    )
    context = RunContext(
        config=config,
        run_dir=tmp_path,
        model_path=path,
        tokenizer=families.renderer("qwen3_vl").tokenizer,
        processor=families.processor("qwen3_vl"),
    )

    async def main() -> None:
        sampler = SGLangSampler(context, SGLangSamplerOptions(urls=("http://127.0.0.1:9",), sync="disk"))
        with pytest.raises(SamplerError, match=r"127\.0\.0\.1:9"):
            await sampler.start()
        await sampler.aclose()

    asyncio.run(main())
    assert "must run with SGLANG_VLM_CACHE_SIZE_MB=0" in caplog.text


def test_prompts_that_servers_say_they_read_are_compared() -> None:
    check_prompt({}, [1, 2])
    check_prompt({"prompt_token_ids": [1, 2]}, [1, 2])
    for read in ([1, 3], [1], [1, 2, 3]):
        with pytest.raises(BadReply, match="of the prompt, not"):
            check_prompt({"prompt_token_ids": read}, [1, 2])
