"""What judges have said, by everything that it depends on: in memory, and in a folder if there is one."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_gym.errors import RewardError

log = logging.getLogger("relax_gym")
REMEMBERED = 100_000


class JudgementCache:
    """Maps a digest to what was judged. One file for each, which appears in one rename: runs may share a folder."""

    def __init__(self, folder: str) -> None:
        """`folder` "" keeps nothing on the disk. Raises RewardError when it cannot be made."""
        self._folder = Path(folder) if folder else None
        self._kept: OrderedDict[str, Any] = OrderedDict()
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RewardError(f"genrm: cache = {folder!r} cannot be made: {error}; give another folder") from error

    def get(self, digest: str) -> Any:
        """What was put there, or None. A file that is broken is as if it were not there."""
        if digest not in self._kept and self._folder is not None:
            try:
                self._remember(digest, json.loads(self._path(digest).read_bytes())["judged"])
            except (OSError, ValueError, KeyError, TypeError):
                return None
        return self._kept.get(digest)

    def put(self, digest: str, judged: Any, replies: Any) -> None:
        """Keep what was judged; `replies`, what the judge said, is for people who look into the folder."""
        self._remember(digest, judged)
        if self._folder is None:
            return
        path = self._path(digest)
        try:
            path.parent.mkdir(exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", suffix=".partial", delete=False) as partial:
                partial.write(json.dumps({"judged": judged, "replies": replies}).encode())
            os.replace(partial.name, path)
        except OSError as error:
            log.warning("genrm: %s is not kept: %s", path, error)

    def _path(self, digest: str) -> Path:
        assert self._folder is not None
        return self._folder / digest[:2] / f"{digest}.json"

    def _remember(self, digest: str, judged: Any) -> None:
        self._kept[digest] = judged
        while len(self._kept) > REMEMBERED:
            self._kept.popitem(last=False)


def digest(content: Mapping[str, Any]) -> str:
    """SHA-256 of JSON data, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
