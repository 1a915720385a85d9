"""What the local sampler knows of an episode's ids, images and positions. No model."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from relax_gym.media import Image
from relax_gym.sampler import SamplingParams
from relax_gym.types import Placed
from relax_gym_plugins.samplers.local.contexts import Context, Request

PAD = 9


def image(shade: int) -> Image:
    return Image(pixels=np.full((2, 2, 3), shade, dtype=np.uint8))


def request(ids: list[int], *media: tuple[Image, int, int], limit: int = 4) -> Request:
    return Request(
        prompt=np.array(ids),
        media=[Placed(media=item, start=start, end=end) for item, start, end in media],
        params=SamplingParams(max_new_tokens=limit),
        limit=limit,
        arrival=0,
        future=Future(),
    )


RED, BLUE = image(1), image(2)
PROMPT = [1, PAD, PAD, PAD, 2, 3]


def begun(*requests: Request, cached: int = 0) -> Context:
    context = Context(order=0)
    for each in requests:
        context.begin(each)
        context.cached = max(context.cached, cached)
    return context


def test_the_same_image_keeps_what_is_cached_and_another_one_does_not() -> None:
    context = begun(request(PROMPT, (RED, 1, 4)), cached=6)
    context.begin(request([*PROMPT, 4, 5], (image(1), 1, 4)))
    assert context.cached == 6
    context.begin(request([*PROMPT, 4, 5], (BLUE, 1, 4)))
    assert context.cached == 1
    context.cached = 6
    context.begin(request([1, PAD, PAD, PAD, 2, 3, 7]))
    assert context.cached == 1


def test_what_is_cached_never_ends_inside_an_image() -> None:
    context = begun(request([1, PAD, PAD, PAD], (RED, 1, 4)), cached=4)
    context.begin(request([1, PAD, PAD, PAD], (RED, 1, 4)))
    assert context.cached == 1, "the last id is computed anew, so the whole image is"


def test_a_piece_of_a_prompt_ends_before_an_image_that_it_would_cut_or_takes_all_of_it() -> None:
    context = begun(request(PROMPT, (RED, 1, 4)))
    assert [context.piece(size) for size in (1, 2, 3, 4, 5, 99)] == [1, 1, 1, 4, 5, 6]
    context.cached = 1
    assert [context.piece(size) for size in (1, 2, 3, 4)] == [3, 3, 3, 4]
    assert [placed.media for placed in context.media_in(1, 4)] == [RED]
    assert context.media_in(0, 1) == context.media_in(4, 6) == []


def test_text_goes_on_where_the_positions_of_the_prompt_end() -> None:
    context = Context(order=0)
    axes = np.array([[0, 1, 1, 1, 3, 4], [0, 1, 1, 2, 3, 4], [0, 1, 2, 1, 3, 4]])
    context.begin(request(PROMPT, (RED, 1, 4)), axes)
    for token in (5, 6):
        context.append(token)
    assert context.positions_of(2, 8).tolist() == [[1, 1, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], [2, 1, 3, 4, 5, 6]]
    assert context.positions_of(7, 8).tolist() == [[6]] * 3
    context.begin(request([1, 2, 3]))
    assert context.positions_of(1, 3).tolist() == [[1, 2]]
