"""Models built in code that see and hear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax_gym.chat import ChatRenderer
from relax_gym.config import MediaConfig, ModelConfig
from relax_gym.errors import ConfigError
from relax_gym.media.items import Audio, Image, Media, Video
from relax_gym.models import load_language_model, load_tokenizer, positions, resolve_model
from relax_gym.processing import MediaProcessor
from relax_gym.tiny_multimodal import TINY_MODELS
from relax_gym.types import Placed, StopReason, TrainingSample
from relax_gym_trainers.torch_learner.packing import pack
from relax_gym_trainers.torch_learner.policy import Policy

SMALL = {"hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "encoder_size": 16}
READS = {
    "tiny-qwen3-vl": {"image", "video"},
    "tiny-qwen2-audio": {"audio"},
    "tiny-qwen2.5-omni": {"image", "video", "audio"},
}
CLASSES = {
    "tiny-qwen3-vl": "Qwen3VLForConditionalGeneration",
    "tiny-qwen2-audio": "Qwen2AudioForConditionalGeneration",
    "tiny-qwen2.5-omni": "Qwen2_5OmniThinkerForConditionalGeneration",
}


def image(seed: int = 0, side: int = 32) -> Image:
    return Image(pixels=np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))


def video() -> Video:
    frames = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
    return Video(frames=frames, times=np.arange(4) / 2, indices=np.arange(4), total_frames=4, duration=2.0)


def audio(seconds: float) -> Audio:
    samples = np.random.default_rng(0).standard_normal(round(16000 * seconds)).astype(np.float32)
    return Audio(samples=samples / 5, rate=16000)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RELAX_GYM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def built(name: str, **options: Any) -> Path:
    return resolve_model(ModelConfig(name=name, kwargs={**SMALL, **options}))


def processor(folder: Path) -> MediaProcessor:
    loaded = MediaProcessor.load(folder, MediaConfig())
    assert loaded is not None
    return loaded


def prompt(folder: Path, *media: Media) -> tuple[list[int], tuple[Placed, ...], str]:
    """Ids of one message with these items, where they are, and its text."""
    renderer = ChatRenderer(load_tokenizer(folder), processor=processor(folder))
    content = [{"type": "text", "text": "Look: "}, *({"type": m.kind, m.kind: m} for m in media)]
    conversation = renderer.conversation()
    context = conversation.observe([{"role": "user", "content": content}])
    return list(context.context_ids), context.media, renderer.decode(context.context_ids)


@pytest.mark.parametrize("name", READS)
def test_tiny_models_are_what_they_are_called(name: str) -> None:
    folder = built(name)
    model = load_language_model(folder, dtype=torch.float32)
    assert type(model).__name__ == CLASSES[name]
    assert set(processor(folder).tokens) == READS[name]
    assert positions(model.config) == 4096
    tokenizer = load_tokenizer(folder)
    everything = "".join(map(chr, range(32, 127))) + "\nsystem assistant users tool\n<|im_start|>"
    assert tokenizer.decode(tokenizer.encode(everything)) == everything
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


@pytest.mark.parametrize("name", READS)
def test_the_same_options_give_the_same_bytes(name: str, tmp_path: Path) -> None:
    tiny, folder = TINY_MODELS[name], built(name)
    torch.manual_seed(123)
    before = torch.random.get_rng_state()
    for seed in (0, 1):
        (tmp_path / str(seed)).mkdir()
        tiny.write(tiny.check(name, {**SMALL, "seed": seed}), tmp_path / str(seed))
    assert torch.equal(torch.random.get_rng_state(), before)
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "0").iterdir())

    def changed(seed: str) -> list[str]:
        return [name for name in names if (folder / name).read_bytes() != (tmp_path / seed / name).read_bytes()]

    assert (changed("0"), changed("1")) == ([], ["model.safetensors"])
    assert built(name) == folder and built(name, seed=1) != folder


def test_matrices_of_encoders_are_scaled_too() -> None:
    one, four = (load_language_model(built("tiny-qwen3-vl", init_scale=s), dtype=torch.float32) for s in (1.0, 4.0))
    compared = {name: (p, four.get_parameter(name)) for name, p in one.named_parameters()}
    assert all(torch.equal(4 * p if p.dim() >= 2 else p, scaled) for p, scaled in compared.values())
    assert any("visual" in name for name in compared)


def test_templates_show_media_where_they_stand() -> None:
    vision = built("tiny-qwen3-vl")
    shown = "<|vision_start|>" + 4 * "<|image_pad|>" + "<|vision_end|>"  # 32 / (8 * 2) = 2 tokens a side
    _, media, text = prompt(vision, image(), image(1, side=16))
    one = "<|vision_start|><|image_pad|><|vision_end|>"
    assert text == f"<|im_start|>user\nLook: {shown}{one}<|im_end|>\n<|im_start|>assistant\n"
    assert [(p.start, p.end) for p in media] == [(10, 14), (16, 17)]
    assert prompt(vision, video())[2].count("<|video_pad|>") == 8  # two pairs of frames
    hearing = built("tiny-qwen2-audio", audio_seconds=1)
    assert prompt(hearing, audio(0.5))[2].count("<|AUDIO|>") == 12
    _, media, text = prompt(built("tiny-qwen2.5-omni"), audio(1.0), image(), video())
    assert [p.media.kind for p in media] == ["audio", "image", "video"]
    assert [text.count(f"<|{kind}|>") for kind in ("AUDIO", "IMAGE", "VIDEO")] == [25, 4, 8]


def test_frames_of_long_videos_are_as_large_as_images() -> None:
    small = built("tiny-qwen3-vl", max_pixels=32 * 32)
    assert prompt(small, image(side=128))[2].count("<|image_pad|>") == 4
    frames = np.zeros((8, 128, 128, 3), np.uint8)
    long = Video(frames=frames, times=np.arange(8) / 2, indices=np.arange(8), total_frames=8, duration=4.0)
    assert prompt(small, long)[2].count("<|video_pad|>") == 4 * 4


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("tiny-qwen3-vl", {"patch_sise": 8}, r"'model\.kwargs\.patch_sise'.*did you mean 'patch_size'"),
        ("tiny-qwen3-vl", {"audio_seconds": 8}, r"unknown key 'model\.kwargs\.audio_seconds'"),
        ("tiny-qwen2-audio", {"audio_seconds": 31}, r"model\.kwargs\.audio_seconds = 31: .*less than or equal to 30"),
        ("tiny-qwen2.5-omni", {"hidden_size": 36}, r"hidden_size 36 must be a multiple of 2 \* num_heads = 8"),
        ("tiny-qwen2.5-omni", {"encoder_size": 12}, r"model\.kwargs\.encoder_size = 12: .*multiple of 8"),
    ],
)
def test_options_are_checked(name: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_model(ModelConfig(name=name, kwargs=kwargs))


def sample(folder: Path, item: Image, answer: list[int], episode: str) -> TrainingSample:
    ids, media, _ = prompt(folder, item)
    mask = np.array([0] * len(ids) + [1] * len(answer))
    return TrainingSample(
        episode_id=episode,
        group_id=item.digest,
        env_id="test/None-v0",
        segment=0,
        token_ids=np.array([*ids, *answer], dtype=np.int32),
        loss_mask=mask.astype(np.int8),
        logprobs=np.zeros(len(mask), np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        advantages=mask.astype(np.float32),
        turn_spans=((len(ids), len(mask)),),
        turn_rewards=(0.0,),
        reward=0.0,
        stop_reason=StopReason.ENV_DONE,
        media=media,
    )


def test_answers_of_one_token_in_a_shared_prompt_leave_positions_of_others_as_they_are() -> None:
    folder = built("tiny-qwen3-vl")
    model, reader = load_language_model(folder, dtype=torch.float32).eval(), processor(folder)
    answers = {image(0, side=64): ([20, 30, 2], [2]), image(1): ([21, 2], [2]), image(2, side=48): ([2], [22, 2])}
    samples = [sample(folder, item, a, f"{i}{a}") for i, (item, pair) in enumerate(answers.items()) for a in pair]

    def logprobs(share: bool) -> dict[str, list[float]]:
        policy = Policy(model, temperature=1.0, dtype=torch.float32, chunk=64, share_prefix=share, processor=reader)
        found = {}
        for batch in pack(samples, budget=2000, share_prefix=share, pair_cost=0):
            pieces = policy.score(batch)[0].detach().split(batch.token_counts.tolist())
            found |= {member.episode_id: piece.tolist() for member, piece in zip(batch.members, pieces, strict=True)}
        return found

    together, alone = logprobs(True), logprobs(False)
    assert len(alone) == 6
    assert all(together[key] == pytest.approx(alone[key], abs=1e-5) for key in alone)
