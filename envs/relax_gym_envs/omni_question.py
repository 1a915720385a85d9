"""A question that takes a picture, a video and a sound together."""

from __future__ import annotations

from collections.abc import Sequence

from relax_gym.errors import ConfigError
from relax_gym_envs._clips import COLOURS, check_size, with_sound
from relax_gym_envs._quiz import Part, Question, Quiz, check_kinds
from relax_gym_envs._scenes import RULE, Scene, draw_scene
from relax_gym_envs._text import check_range

MODALITIES = ("image", "video", "audio")


class OmniQuestion(Quiz):
    """A picture of four colours, a shape that moves left or right, and a high or low tone. Which colour is meant?

    The column of the picture is where the shape moves to, the row (top or bottom) is how high the tone is. All three
    come in one message, in any order, and only all three together tell the answer.

    Args:
        modalities: which of "image", "video" and "audio" to use; what another would tell is said in words.
        sound_in_video: the tone is the sound track of the video instead of a part. Set `media.sound_in_video` too, and
            `rate` to the model's own.
        turns: questions in an episode, each with new media.
        frames: frames of the video, 3 to 64.
        fps: frames per second, 0.1 to 240; the tone lasts as long as the video.
        size: pixels a side of picture and video, 16 to 1024, a multiple of 4.
        rate: samples of the sound per second, 4000 to 48000.
        wrap: the shape starts anywhere and goes on through the edge, so that no single frame tells the direction.
            Without, it crosses from one edge to the other, which is easier.
        style: "plain" asks in sentences, and the last colour a reply names counts; "terse" asks in a word or two and
            takes a colour only, exactly.
        shuffle_media: show the media of another seed: what is still learned then is not learned from them.

    A right answer gives 1 / `turns`. `info["correct"]` says whether all were right.
    """

    def __init__(
        self,
        modalities: Sequence[str] = MODALITIES,
        sound_in_video: bool = False,
        turns: int = 1,
        frames: int = 4,
        fps: float = 2.0,
        size: int = 128,
        rate: int = 16000,
        wrap: bool = True,
        style: str = "plain",
        shuffle_media: bool = False,
    ) -> None:
        super().__init__(turns, style, shuffle_media)
        self.modalities = check_kinds("modalities", modalities, MODALITIES)
        if sound_in_video and not {"video", "audio"} <= set(modalities):
            raise ConfigError(
                f"sound_in_video needs video and audio, but modalities is {list(modalities)}; add them or leave it out"
            )
        check_range("frames", frames, 3, 64)
        check_range("fps", fps, 0.1, 240.0)
        check_size(size)
        check_range("rate", rate, 4000, 48000)
        self.sound_in_video, self.frames, self.fps = sound_in_video, frames, float(fps)
        self.size, self.rate, self.wrap = size, rate, wrap

    def _ask(self) -> tuple[list[Part], Question]:
        self.scene = draw_scene(self.rng, wrap=self.wrap)
        media = self._media(self._shown(self.scene, lambda rng: draw_scene(rng, wrap=self.wrap)))
        self.rng.shuffle(media)
        told = [self.scene.told(modality) for modality in MODALITIES if modality not in self.modalities]
        text = " ".join([RULE, *(sentence for sentence, _ in told), "What is the colour?"])
        terse = " ".join([*(words for _, words in told), "colour?"])
        return media, Question(text=text, terse=terse, answer=self.scene.answer, options=tuple(COLOURS))

    def _media(self, scene: Scene) -> list[Part]:
        frames, sound = scene.clip.frames(self.size, self.frames), scene.sound(self.rate, self.frames / self.fps)
        parts: dict[str, Part] = {
            "image": {"type": "image", "image": scene.image(self.size)},
            "video": {"type": "video", "video": frames, "fps": self.fps},
            "audio": {"type": "audio", "audio": (sound, self.rate)},
        }
        if self.sound_in_video:
            parts["video"] = {"type": "video", "video": with_sound(frames, self.fps, sound, self.rate)}
            del parts["audio"]
        return [part for modality, part in parts.items() if modality in self.modalities]
