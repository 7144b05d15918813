"""Whether somebody other than root could change what a root daemon reads.

A daemon that runs as root starts what its configuration says, as whom it says: whoever can write that file, a
directory above it or a link on the way is root. `way_to` looks at the disk, `distrust_of` judges what was seen.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_MAX_LINKS: Final = 40
"""As many as the kernel follows (path_resolution(7))."""

_MOVE: Final = "move it to a directory that only root can write, such as /etc/vllm-supervisor"


@dataclass(frozen=True, slots=True)
class Seen:
    """One directory, link or file on the way to a file, as lstat(2) shows it."""

    path: str
    uid: int
    mode: int


@dataclass(frozen=True, slots=True)
class Distrust:
    """What somebody else could change, in what way, and how to end that."""

    path: str
    reason: str
    remedy: str


def distrust(path: str) -> Distrust | None:
    """Why the file or directory must not be believed by root; None when only root can change it. Raises OSError."""
    return distrust_of(way_to(path))


def distrust_of(way: Sequence[Seen]) -> Distrust | None:
    """Judge a way from / to a file: every entry follows the directory (or the link) in which it is looked up.

    A directory that others can write is safe only on the way, and only with the sticky bit and an entry of root's in
    it: such an entry cannot be renamed or replaced (mktemp -d under /tmp). The last entry must be root's alone.
    Such a directory is everybody's on purpose, so the remedy is another place.
    """
    for seen, following in zip(way, [*way[1:], None], strict=True):
        if stat.S_ISLNK(seen.mode):
            continue  # only its directory decides where it points
        if seen.uid != 0:
            return Distrust(seen.path, f"it belongs to uid {seen.uid}", f"chown root {seen.path}")
        if not seen.mode & 0o022:
            continue
        if following is not None and seen.mode & stat.S_ISVTX and following.uid == 0:
            continue
        who = "every user" if seen.mode & 0o002 else "its group"
        mode = stat.S_IMODE(seen.mode)
        remedy = _MOVE if seen.mode & stat.S_ISVTX else f"chmod go-w {seen.path}"
        return Distrust(seen.path, f"{who} can write to it (mode {mode:04o})", remedy)
    return None


def way_to(path: str) -> list[Seen]:
    """Everything that is looked up to reach an absolute path, links followed. Raises OSError as lstat(2) does."""
    way = [_seen("/")]
    todo = _parts(path)
    at = "/"
    links = 0
    while todo:
        part = todo.pop(0)
        if part == "..":
            at = os.path.dirname(at)  # noqa: PTH120 (text: `at` holds no links)
            way.append(_seen(at))
            continue
        here = os.path.join(at, part)  # noqa: PTH118 (text)
        way.append(_seen(here))
        if not stat.S_ISLNK(way[-1].mode):
            at = here
            continue
        if (links := links + 1) > _MAX_LINKS:
            raise OSError(40, "too many symbolic links", path)
        target = os.readlink(here)  # noqa: PTH115 (text)
        todo = _parts(target) + todo
        if target.startswith("/"):
            at = "/"
        way.append(_seen(at))
    return way


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in {"", "."}]


def _seen(path: str) -> Seen:
    status = os.lstat(path)
    return Seen(path, status.st_uid, status.st_mode)
