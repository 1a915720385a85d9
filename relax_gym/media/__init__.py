"""Images, videos and audio: `items` is what they are once loaded, `loader` takes them in any form."""

from relax_gym.errors import MediaError
from relax_gym.media.items import KINDS, Audio, Image, Kind, Media, Video

__all__ = ["KINDS", "Audio", "Image", "Kind", "Media", "MediaError", "Video"]
