"""Observations with media in any accepted form → the same observations with loaded items."""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from relax_gym.config import MediaConfig
from relax_gym.errors import MediaError
from relax_gym.media.decoding import Wanted, decode
from relax_gym.media.items import Kind, Media
from relax_gym.media.sources import Encoded, Plain, describe, find_source, is_positive
from relax_gym.processing import MediaProcessor
from relax_gym.types import Message

if TYPE_CHECKING:
    from pebble import ProcessPool

Part = Mapping[str, Any]
GLANCE = 1.0
"""Seconds between looks at whether the workers are still there."""


@dataclass(slots=True)
class _Loading:
    """A load that is under way, and how many calls wait for it."""

    task: asyncio.Future[Media]
    waiting: int = 0


class MediaLoader:
    """Loads what observations hold. One loader serves all episodes of a run, in one event loop.

    Whatever is encoded is decoded in worker processes, which are ended when they take too long and replaced when they
    die; arrays and Pillow images are converted in threads. Equal content is one object for as long as anybody has it,
    and a file, URL or bytes that several episodes ask for at the same time is decoded once. When all that wait for it
    are cancelled, it ends.

    Args:
        config: limits, and how videos are sampled.
        processor: what the items are for: it says which rate audio is converted to, and its features of each new item
            are made here, off the event loop.
        decode: what the workers run.
    """

    def __init__(
        self,
        config: MediaConfig | None = None,
        *,
        processor: MediaProcessor | None = None,
        decode: Callable[[Kind, Any, Wanted], Media] = decode,
    ) -> None:
        self._config = config or MediaConfig()
        self._processor = processor
        self._decode = decode
        self._pool: ProcessPool | None = None
        self._known: WeakValueDictionary[Hashable, Media] = WeakValueDictionary()
        self._loading: dict[Hashable, _Loading] = {}

    async def load(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with every media part as `{"type": kind, kind: Media}`. The given ones are not changed.

        Raises:
            MediaError: names the source of the first that cannot be read, and says why.
        """
        parts = [part for message in messages for part in _media_parts(message)]
        if not parts:
            return list(messages)
        loaded = iter(await _all([self._item(part) for part in parts]))
        return [_with_items(message, loaded) if _media_parts(message) else message for message in messages]

    def close(self) -> None:
        """End the worker processes, whatever they are doing; who waits for them gets a MediaError. Idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()  # type: ignore[no-untyped-call]
            pool.join()

    async def _item(self, part: Part) -> Media:
        kind: Kind = part["type"]
        name = ""
        try:
            wanted = self._wanted(part)
            source = await asyncio.to_thread(find_source, kind, part)
            name = source.name
            if isinstance(source, Encoded):
                key = (kind, source.key, wanted.fps, wanted.min_frames, wanted.max_frames)
                read = partial(self._in_worker, kind, source, wanted)
                return await self._once(key, partial(self._finish, read))
            return await self._finish(partial(asyncio.to_thread, from_memory, kind, source, wanted))
        except MediaError as error:
            raise MediaError(f"{kind} {name}: {error}" if name else f"{kind}: {error}") from error

    async def _finish(self, read: Callable[[], Awaitable[Media]]) -> Media:
        """What `read` gives, made fit for the model; the object that somebody has already, when it equals one."""
        try:
            item = await read()
        except MediaError:
            raise
        except Exception as error:  # a decoder raises whatever its format makes it stumble over
            raise MediaError(f"cannot be read: {type(error).__name__}: {error}") from error
        if self._processor is not None:
            item = await asyncio.to_thread(self._processor.fitted, item, self._config.video_max_tokens)
        return self._known.setdefault(item.digest, item)

    def _wanted(self, part: Part) -> Wanted:
        rate = None if self._processor is None else self._processor.audio_rate
        own = {key: part.get(key) for key in ("fps", "min_frames", "max_frames")} if part["type"] == "video" else {}
        return Wanted(config=self._config, rate=rate, **own)

    async def _once(self, key: Hashable, load: Callable[[], Coroutine[Any, Any, Media]]) -> Media:
        """What `load` gives; a call with the same key joins one that is under way."""
        known = self._known.get(key)
        if known is not None:
            return known
        loading = self._loading.get(key)
        if loading is None:
            loading = self._loading[key] = _Loading(asyncio.ensure_future(load()))
        loading.waiting += 1
        try:
            item = self._known[key] = await asyncio.shield(loading.task)
            return item
        finally:
            loading.waiting -= 1
            if not loading.waiting:
                del self._loading[key]
                loading.task.cancel()

    async def _in_worker(self, kind: Kind, source: Encoded, wanted: Wanted) -> Media:
        pool, limit = self._workers(), self._config.timeout
        from pebble import ProcessExpired

        job = asyncio.wrap_future(pool.schedule(self._decode, args=(kind, source.data, wanted), timeout=limit))
        try:
            while not (await asyncio.wait([job], timeout=GLANCE))[0]:
                if not pool.active:  # pebble forgets some of the jobs of a pool that breaks
                    raise BrokenExecutor
            return job.result()
        except TimeoutError as error:
            raise MediaError(f"took longer than media.timeout = {limit:g} s to read") from error
        except ProcessExpired as error:
            raise MediaError(f"made its decoder crash (exit code {error.exitcode})") from error
        except BrokenExecutor as error:
            raise MediaError(
                "the processes that decode have ended; where they cannot start, put what your script does under "
                "`if __name__ == '__main__':`, because they import it"
            ) from error
        finally:
            job.cancel()

    def _workers(self) -> ProcessPool:
        """A pool that works; one in which a worker died while it had nothing to do does not."""
        try:
            from pebble import ProcessPool
        except ImportError as error:
            raise MediaError("reading it needs pebble: pip install 'relax-gym[media]'") from error
        if self._pool is not None and not self._pool.active:
            self.close()
        if self._pool is None:
            self._pool = ProcessPool(self._config.workers, context=multiprocessing.get_context("spawn"))
        return self._pool


def from_memory(kind: Kind, source: Plain, wanted: Wanted) -> Media:
    """An item from arrays or Pillow images. Nothing of it is shared with them.

    Raises:
        MediaError: says what is wrong with it, without its name.
    """
    if isinstance(source.value, Media):
        if source.value.kind != kind:
            raise MediaError(f"is {source.value!r}")
        return source.value
    if kind == "image":
        from relax_gym.media.images import image_of

        return image_of(source.value, **wanted.image())
    if kind == "audio":
        from relax_gym.media.audio import audio_of

        return audio_of(source.value, source.rate, **wanted.audio())
    return _from_frames(source, wanted)


def _from_frames(source: Plain, wanted: Wanted) -> Media:
    from relax_gym.media.images import image_of
    from relax_gym.media.video import video_of_frames

    if source.rate is None:
        raise MediaError("is frames without a rate; give the part a key fps, or (frames, fps)")
    if not is_positive(source.rate):
        raise MediaError(f"has fps = {source.rate!r}; it must be a positive number")
    try:
        frames = [image_of(frame, **wanted.image()).pixels for frame in source.value]
    except TypeError as error:
        raise MediaError(
            f"is {describe(source.value)}; frames are a list of images or [frames, height, width, 3]"
        ) from error
    plan = dataclasses.replace(wanted.video(), fps=source.rate)  # an env that gives frames has chosen them
    return video_of_frames(frames, source.rate, plan)


async def _all(jobs: Sequence[Coroutine[Any, Any, Media]]) -> list[Media]:
    """The results in order. Raises the error of the first that failed, once all have ended."""
    results = await asyncio.gather(*jobs, return_exceptions=True)
    items: list[Media] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        items.append(result)
    return items


def _media_parts(message: Message) -> list[Part]:
    content = message.get("content")
    return [part for part in content if part["type"] != "text"] if isinstance(content, (list, tuple)) else []


def _with_items(message: Message, items: Iterator[Media]) -> Message:
    parts = []
    for part in message["content"]:
        kind = part["type"]
        parts.append(part if kind == "text" else {"type": kind, kind: next(items)})
    return {**message, "content": parts}
