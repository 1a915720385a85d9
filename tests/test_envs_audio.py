"""What the audio and omni envs play: every answer can be heard, and is in nothing else."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from question_solvers import (
    ORDINALS,
    answer_audio,
    beeps,
    colour_name,
    parts,
    peak_hertz,
    pitch,
    shapes,
    speech_features,
    text_of,
)

import relax_gym
from relax_gym.media import Video
from relax_gym_envs._sounds import KINDS, PITCHES
from relax_gym_envs._speech import Voice, speak, word_seconds


def make(**kwargs: Any) -> Any:
    return relax_gym.make("relax_gym/AudioQuestion-v0", **kwargs)


def sound(env: Any, seed: int) -> tuple[str, Any, int]:
    """(question, samples, rate) of the first turn."""
    observation, _ = env.reset(seed=seed)
    return text_of(observation), *parts(observation, "audio")[0]["audio"]


def slower(**arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': 'listen_slower', 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize(("seconds", "rate", "length"), [(1, 4000, 4000), (2.5, 16000, 40000), (0.5, 22050, 11025)])
def test_a_sound_has_its_rate_and_length(seconds: float, rate: int, length: int) -> None:
    for kind in KINDS:
        _, samples, given = sound(make(questions=[kind], seconds=seconds, rate=rate), 0)
        assert (samples.shape, samples.dtype, given) == ((length,), np.float32, rate)
        assert 0.25 < np.abs(samples).max() < 1.0


@pytest.mark.parametrize("kind", ["pitch", "compare", "count", "rhythm"])
@pytest.mark.parametrize("form", [{"rate": 4000}, {"rate": 16000, "seconds": 2.0, "noise": 0.01}])
def test_samples_tell_the_answer(kind: str, form: dict[str, Any]) -> None:
    env = make(questions=[kind], **form)
    for seed in range(40):
        assert answer_audio(*sound(env, seed)) == env.expert_action()


@pytest.mark.parametrize("kind", ["pitch", "compare", "count", "rhythm"])
def test_samples_of_shuffled_media_tell_nothing(kind: str) -> None:
    env = make(questions=[kind], rate=4000, shuffle_media=True)
    right = [answer_audio(*sound(env, seed)) == env.expert_action() for seed in range(400)]
    assert np.mean(right) == pytest.approx(1 / len(env.question.options), abs=0.08)  # three standard errors


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_balanced(kind: str) -> None:
    env, answers = make(questions=[kind], rate=4000, seconds=0.5), Counter[str]()
    for seed in range(300):
        env.reset(seed=seed)
        answers[env.expert_action()] += 1
    options = env.question.options
    assert answers.keys() == set(options)
    for count in answers.values():
        assert count == pytest.approx(300 / len(options), abs=0.2 * 300 / len(options) + 10)


def test_the_peak_of_a_tone_is_in_the_band_of_its_class() -> None:
    env = make(questions=["pitch"], rate=4000)
    for seed in range(40):
        _, samples, rate = sound(env, seed)
        low, high = PITCHES[env.expert_action()]
        assert low - 1 <= peak_hertz(samples, rate) <= high + 1


def digits(rate: int, seeds: range, **kwargs: Any) -> tuple[Any, list[str]]:
    """(features, digits) of some episodes."""
    env = make(questions=["digit"], rate=rate, **kwargs)
    heard = [(speech_features(*sound(env, seed)[1:]), env.expert_action()) for seed in seeds]
    return np.stack([features for features, _ in heard]), [digit for _, digit in heard]


@pytest.mark.parametrize(("rate", "least"), [(4000, 0.9), (8000, 0.95)])
def test_digits_are_told_apart_over_unheard_voices(rate: int, least: float) -> None:
    known, names = digits(rate, range(300))
    features, expected = digits(rate, range(1000, 1060))
    nearest = [names[int(((known - one) ** 2).sum(axis=1).argmin())] for one in features]
    assert np.mean([a == b for a, b in zip(nearest, expected, strict=True)]) >= least


def test_digits_of_shuffled_media_tell_nothing() -> None:
    known, names = digits(4000, range(150))
    features, expected = digits(4000, range(1000, 1150), shuffle_media=True)
    nearest = [names[int(((known - one) ** 2).sum(axis=1).argmin())] for one in features]
    assert np.mean([a == b for a, b in zip(nearest, expected, strict=True)]) == pytest.approx(0.1, abs=0.08)


def test_a_voice_has_its_pitch_formants_and_speed() -> None:
    def vowel(voice: Voice, stretch: float = 1.0) -> Any:
        wave = speak("four", voice, rate=16000, stretch=stretch, noise=np.random.default_rng(0))
        return wave[int(0.45 * len(wave)) :][:4000]

    low, high = Voice(pitch=100, formants=1.0, speed=1.0), Voice(pitch=200, formants=1.0, speed=1.0)
    for voice in (low, high):
        for stretch in (1.0, 3.0):
            wave = vowel(voice, stretch)
            echo = np.correlate(wave, wave, "full")[len(wave) - 1 :]
            period = 16000 / (60 + int(np.argmax([echo[round(16000 / hertz)] for hertz in range(60, 300)])))
            assert 16000 / period == pytest.approx(voice.pitch, rel=0.12)
    assert word_seconds("six", Voice(pitch=100, formants=1.0, speed=2.0)) == pytest.approx(word_seconds("six", low) / 2)


@pytest.mark.parametrize("factor", [1.0, 2.0, 3.5])
def test_listening_slower_stretches_time_and_keeps_the_pitch(factor: float) -> None:
    env = make(questions=["rhythm"], rate=8000)
    _, samples, rate = sound(env, 3)
    result = env.step(slower(factor=factor))
    assert result[1:4] == (0.0, False, False)
    assert result.info["tool_log"] == [{"name": "listen_slower", "arguments": {"factor": factor}, "error": None}]
    (message,) = result.observation
    assert (message["role"], message["name"]) == ("tool", "listen_slower")
    assert [part["type"] for part in message["content"]] == ["audio", "text"]
    again, rate = message["content"][0]["audio"]
    assert len(again) == factor * len(samples)
    assert peak_hertz(again, rate) == pytest.approx(peak_hertz(samples, rate), abs=12)
    assert beeps(again, rate) == pytest.approx([factor * length for length in beeps(samples, rate)], abs=0.03)
    assert env.step(env.expert_action()).info == {"correct": True}


def test_a_spoken_digit_is_stretched_too() -> None:
    env = make(questions=["digit"], rate=8000)
    _, samples, _ = sound(env, 0)
    again, rate = parts(env.step(slower()).observation, "audio")[0]["audio"]
    assert (len(again), rate) == (2 * len(samples), 8000)
    assert [np.abs(half).max() > 0.1 for half in (samples, again)] == [True, True]
    known, names = digits(8000, range(300))
    nearest = names[int(((known - speech_features(again, rate)) ** 2).sum(axis=1).argmin())]
    assert nearest == env.expert_action()


def test_the_tool_says_what_it_takes_and_when_it_is_used_up() -> None:
    env = make(questions=["count"], replays=1, turns=2)
    env.reset(seed=0)

    def told(action: str) -> str:
        return text_of(env.step(action).observation)

    assert told(slower(factor=5)) == "Error: factor is 5.0; it must be from 1 to 4"
    assert told(slower(factor="nan")) == "Error: factor is nan; it must be from 1 to 4"
    assert told(slower()) == "The same sound, 2 times slower."
    assert told(slower()) == "Error: you have listened again 1 times, which is all you may; answer now"
    env.step(env.expert_action())
    assert told(slower(factor=4)) == "The same sound, 4 times slower."


def test_without_replays_there_is_no_tool() -> None:
    assert [tool["function"]["name"] for tool in make().tools] == ["listen_slower"]
    env = make(replays=0, style="terse")
    env.reset(seed=0)
    assert env.tools == ()
    assert {env.random_action() for _ in range(50)} == set(env.question.options)


def test_random_actions_use_the_tool_while_they_may() -> None:
    env = make(replays=1)
    env.reset(seed=0)
    calls = [action for action in (env.random_action() for _ in range(50)) if "listen_slower" in action]
    assert 10 < len(calls) < 40
    assert [ran["error"] for ran in env.step(calls[0]).info["tool_log"]] == [None]
    assert not any("listen_slower" in env.random_action() for _ in range(50))


# Omni -------------------------------------------------------------------------------------------------------------


def omni(**kwargs: Any) -> Any:
    return relax_gym.make("relax_gym/OmniQuestion-v0", **{"size": 32, "rate": 4000, **kwargs})


def answer_omni(observation: Any) -> str:
    """The colour meant, from pixels and samples, and from the words where a modality is left out."""
    text = text_of(observation)
    videos, sounds = parts(observation, "video"), [part["audio"] for part in parts(observation, "audio")]
    if videos and isinstance(videos[0]["video"], Video) and videos[0]["video"].audio:
        track = videos[0]["video"].audio
        sounds.append((track.samples, track.rate))
    if videos:
        clip = videos[0]["video"]
        direction = shapes(clip.frames if isinstance(clip, Video) else clip)[0][1]
    else:
        direction = "left" if "shape moves left." in text else "right"
    height = pitch(*sounds[0]) if sounds else "low" if "tone is low." in text else "high"
    row, column = int(height == "low"), int(direction == "right")
    if images := parts(observation, "image"):
        picture = images[0]["image"]
        return colour_name(picture[8 + 16 * row, 8 + 16 * column])
    line = text.split("its bottom row ")[1] if row else text.split("its top row is ")[1]
    return line.replace(",", "").replace(".", "").split(" and ")[column].split()[0]


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"sound_in_video": True},
        {"wrap": False},
        *[{"modalities": kinds} for kinds in (["image", "video"], ["video", "audio"], ["image", "audio"], ["audio"])],
    ],
    ids=str,
)
def test_all_that_is_shown_and_said_tells_the_answer(kwargs: dict[str, Any]) -> None:
    env = omni(**kwargs)
    for seed in range(40):
        observation, _ = env.reset(seed=seed)
        assert answer_omni(observation) == env.expert_action()


def test_without_wrap_the_shape_crosses_from_edge_to_edge() -> None:
    for seed in range(10):
        env = omni(wrap=False, modalities=["video"])
        (part,) = parts(env.reset(seed=seed)[0], "video")
        columns = [np.nonzero(frame.max(axis=-1) > 150)[1].max() // 8 for frame in part["video"]]
        assert columns == ([0, 1, 2, 3] if env.scene.direction == "right" else [3, 2, 1, 0])


def test_shuffled_omni_media_tell_nothing() -> None:
    env = omni(shuffle_media=True)
    right = [answer_omni(env.reset(seed=seed)[0]) == env.expert_action() for seed in range(400)]
    assert np.mean(right) == pytest.approx(1 / 4, abs=0.07)


@pytest.mark.parametrize("wrong", ["image", "video", "audio"])
def test_each_modality_is_needed(wrong: str) -> None:
    env, other = omni(), omni()
    right = []
    for seed in range(200):
        strange = other.reset(seed=seed + 1000)[0][0]["content"]
        observation, _ = env.reset(seed=seed)
        content = [part for part in observation[0]["content"] if part["type"] != wrong]
        content += [part for part in strange if part["type"] == wrong]
        right.append(answer_omni([{"role": "user", "content": content}]) == env.expert_action())
    assert np.mean(right) == pytest.approx(1 / 4 if wrong == "image" else 1 / 2, abs=0.11)


def test_the_sound_track_of_a_video() -> None:
    env = omni(sound_in_video=True, frames=6, fps=4.0)
    (part,) = parts(env.reset(seed=0)[0], "video")
    video = part["video"]
    assert parts(env.reset(seed=0)[0], "audio") == []
    assert (video.frames.shape, video.fps, video.duration) == ((6, 32, 32, 3), 4.0, 1.5)
    assert (video.audio.rate, video.audio.seconds) == (4000, 1.5)
    plain, _ = omni(frames=6, fps=4.0).reset(seed=0)
    samples, _ = parts(plain, "audio")[0]["audio"]
    assert np.array_equal(video.audio.samples, samples)
    assert np.array_equal(video.frames, np.stack(parts(plain, "video")[0]["video"]))


def test_omni_answers_are_balanced() -> None:
    env, answers = omni(size=16), Counter[str]()
    for seed in range(400):
        env.reset(seed=seed)
        answers[env.expert_action()] += 1
    assert answers.keys() == {"red", "green", "blue", "yellow"}
    assert max(answers.values()) < 135


def test_terse_omni_questions_name_what_is_left_out() -> None:
    env = omni(modalities=["image"], style="terse")
    text = text_of(env.reset(seed=0)[0])
    assert text in {f"{way} {height} colour?" for way in ("left", "right") for height in ("low", "high")}
    assert ORDINALS[0] not in text
