"""Finished groups that no saved step has trained on, in files of their own: a run that was killed goes on with them.

Pickles, so that a group is exactly what it was, its media and arrays included. They are read from the run's own folder,
which is to be trusted as code is.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Sequence
from pathlib import Path

from relax_gym.disk import THEN_RESUME, explained, write_atomically
from relax_gym.types import Group
from relax_gym.writer import Writer

log = logging.getLogger("relax_gym")


class KeptGroups:
    """One file for each finished group, from when it finishes until no run that goes on can use it any more: there is a
    checkpoint of the step that trained on it, or it was trained on and is newer than the last one.

    With `max_staleness = 0` nothing is kept: a resumed run samples the same groups again.
    """

    def __init__(self, writer: Writer, *, enabled: bool) -> None:
        self._writer, self._enabled = writer, enabled
        self._folder = writer.folder.path / "queue"
        self._taken: dict[int, int] = {}  # slot: step

    def begin(self, *, resumed: bool, unfinished: Sequence[int], first_new: int) -> dict[int, Group]:
        """The groups of slots that are `unfinished` or later ones. What else there is from before is removed."""
        found = self._read() if resumed and self._enabled else {}
        kept = {slot: group for slot, group in found.items() if slot in unfinished or slot >= first_new}
        for path in list(self._folder.glob("*")):
            if path.suffix != ".pickle" or int(path.stem) not in kept:
                path.unlink()
        return kept

    def keep(self, group: Group) -> None:
        """A group has finished. One that cannot be written is sampled again by a run that goes on without it."""
        if self._enabled:
            self._writer.post(self._write, group)

    def take(self, step: int, groups: Sequence[Group], *, saved_version: int) -> None:
        """A step trains on them. The newest checkpoint, which may be under way, has weights of `saved_version`."""
        for group in groups:
            if newest_version(group) > saved_version:  # lost with these weights, should the run go on from there
                self.forget(group.slot)
            else:
                self._taken[group.slot] = step

    def forget(self, slot: int) -> None:
        """Its group is not wanted any more."""
        if self._enabled:
            self._writer.post(self._path(slot).unlink, missing_ok=True)

    def saved(self, step: int) -> None:
        """There is a checkpoint of this step: the groups it and those before it trained on are not needed again."""
        for slot in [slot for slot, taken in self._taken.items() if taken <= step]:
            del self._taken[slot]
            self.forget(slot)

    def _path(self, slot: int) -> Path:
        return self._folder / f"{slot}.pickle"

    def _write(self, group: Group) -> None:
        try:
            content = pickle.dumps(group, pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # whatever the env's objects raise
            log.warning(
                "group %s is lost if the run is killed, as its env's info cannot be kept: %s", group.slot, error
            )
            return
        with explained(str(self._folder), THEN_RESUME):
            self._folder.mkdir(exist_ok=True)
            write_atomically(self._path(group.slot), content)

    def _read(self) -> dict[int, Group]:
        found: dict[int, Group] = {}
        for path in self._folder.glob("*.pickle"):
            try:
                group = pickle.loads(path.read_bytes())
            except Exception as error:  # an object of the env that cannot be made again
                log.warning("%s cannot be read and is sampled again: %s: %s", path, type(error).__name__, error)
                continue
            found[group.slot] = group
        return found


def newest_version(group: Group) -> int:
    """The latest version that sampled a token of a group; -1 if it has none."""
    return max((v for t in group.trajectories for turn in t.turns for v in turn.completion.versions), default=-1)
