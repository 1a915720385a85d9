"""Videos as SGLang's processor of Qwen3-VL takes them: nothing chosen, scaled or rounded there.

A server decodes a video, chooses some of its frames and makes their times from the frame rate alone. So each pair of
frames travels as a video of its own: there is nothing to choose, and the rate is the one at which their mean time is
what the prompt says. Qwen3-VL reads pair after pair anyway, so they are the same to it.

Source: `preprocess_video`, `smart_nframes` and `smart_resize` of SGLang 0.5.23's `multimodal/processors/qwen_vl.py`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

FACTOR = 28
"""Servers scale frames to multiples of it first, whatever the model's patches are."""
MIN_PIXELS, MAX_PIXELS = 128 * FACTOR**2, 768 * FACTOR**2
"""What they scale frames to if `mm_process_config` does not say."""
ARGUMENTS: dict[str, Any] = {
    "mm_process_config": {"video": {"min_pixels": 1, "max_pixels": 10**9, "total_pixels": 10**9}}
}
"""Arguments of a server that scales as few frames as possible."""
TIME = re.compile(r"<(\d+)\.(\d) seconds>")
EARLY = 1000
"""Frames a second, when their mean time is 0.0 s."""


def pairs(frames: NDArray[np.uint8], text: str) -> list[bytes]:
    """Two frames at a time, the last one twice if there is no other, as lossless AVI (PNG).

    Args:
        frames: [n, height, width, 3].
        text: what the model reads of the video, which says a time before each pair.
    """
    import av

    tenths = [int(seconds + tenth) for seconds, tenth in TIME.findall(text)]
    padded = np.concatenate([frames, frames[-1:]]) if len(frames) % 2 else frames
    out = []
    for pair, tenth in zip(padded.reshape(-1, 2, *frames.shape[1:]), tenths, strict=True):
        file = io.BytesIO()
        with av.open(file, "w", format="avi") as container:
            stream = container.add_stream("png", rate=Fraction(5, tenth) if tenth else EARLY)
            stream.height, stream.width = frames.shape[1:3]
            stream.pix_fmt = "rgb24"
            for frame in pair:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
            container.mux(stream.encode())
        out.append(file.getvalue())
    return out


def refusal(frames: Sequence[int], info: Mapping[str, Any]) -> str | None:
    """Why a server would not read the frames as they are; None when it does.

    Args:
        frames: [n, height, width, 3], the shape.
        info: its `/server_info`.
    """
    config = dict((info.get("mm_process_config") or {}).get("video") or {})
    if fixed := config.keys() & {"nframes", "resized_height", "resized_width"}:
        return f"the server's mm_process_config sets {', '.join(sorted(fixed))} of videos; remove that"
    _, height, width, _ = frames
    if height % FACTOR or width % FACTOR:
        return f"it scales frames of {width} x {height} pixels; give sides that are multiples of {FACTOR}"
    low = config.get("min_pixels", MIN_PIXELS)
    high = max(min(config.get("max_pixels", MAX_PIXELS), config.get("total_pixels", 10**9)), int(low * 1.05))
    if not low <= height * width <= high:
        return (
            f"it scales frames of {height * width} pixels to {low} to {high}; launch it with --mm-process-config "
            '\'{"video": {"min_pixels": 1, "max_pixels": 1000000000, "total_pixels": 1000000000}}\''
        )
    return None
