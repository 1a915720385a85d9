"""What a processor makes of images, sounds and videos, and what is kept of it."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from relax_gym.media.items import Media

if TYPE_CHECKING:
    from torch import Tensor

LARGE = {"pixel_values", "pixel_attention_mask", "pixel_values_videos", "input_features"}
"""The tensors that have pixels and sound in them; the others are grids, times and lengths."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Features:
    """One item as a model reads it.

    Attributes:
        text: what stands in the prompt instead of the one placeholder that a chat template writes.
        placeholders: how many tokens of it the model replaces by what its encoder makes of the item.
        tensors: the encoder's inputs under the names of the model's arguments.
    """

    text: str
    placeholders: int
    tensors: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def outline(self) -> Features:
        """The same without its large tensors."""
        small = {name: tensor for name, tensor in self.tensors.items() if name not in LARGE}
        return dataclasses.replace(self, tensors=small)


class FeatureCache:
    """The features used last, up to `most_bytes` of them, and the outline of every item that lives.

    Threads may share it, and none waits long. Pickled, it is empty.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._bytes = most_bytes, 0
        self._whole: OrderedDict[str, Features] = OrderedDict()
        self._outlines: WeakKeyDictionary[Media, Features] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return FeatureCache, (self._most_bytes,)

    def whole(self, media: Media) -> Features | None:
        """The features of an item, if they are kept."""
        with self._lock:
            known = self._whole.get(media.digest)
            if known is not None:
                self._whole.move_to_end(media.digest)
                self._outline(media, known)
            return known

    def outline(self, media: Media) -> Features | None:
        """The features of an item without large tensors, if they were made since it, or an equal item, came."""
        with self._lock:
            return self._outlines.get(media)

    def keep(self, media: Media, made: Features) -> None:
        """Keep what was made of an item that is not kept."""
        with self._lock:
            self._whole[media.digest] = made
            self._outline(media, made)
            self._bytes += made.nbytes
            while self._bytes > self._most_bytes and len(self._whole) > 1:
                self._bytes -= self._whole.popitem(last=False)[1].nbytes

    def _outline(self, media: Media, made: Features) -> None:
        if media not in self._outlines:
            self._outlines[media] = made.outline()
