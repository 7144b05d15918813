"""Who an engine runs as, and what that user may reach on disk. It only looks."""

from __future__ import annotations

import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

ENGINE_USER: Final = "vllm"
"""The user of engines when the daemon is root and the configuration names none; the package creates it."""

_ACL: Final = "system.posix_acl_access"


@dataclass(frozen=True, slots=True)
class Account:
    """One line of the account database. `groups` are all of its group ids, the primary one included."""

    name: str
    uid: int
    gid: int
    home: str
    shell: str
    groups: frozenset[int]


def account(name: str) -> Account | None:
    """The account of this name; None when there is none."""
    try:
        found = pwd.getpwnam(name)
    except (KeyError, ValueError):
        return None
    return _account(found)


def own_account() -> Account:
    """The account that this process runs as; made up from the user id when the database does not know it."""
    uid = os.geteuid()
    try:
        return _account(pwd.getpwuid(uid))
    except KeyError:
        return Account(str(uid), uid, os.getegid(), "/", "/bin/sh", frozenset({os.getegid(), *os.getgroups()}))


def may(who: Account, path: str, want: int) -> bool:
    """Whether the modes of a path and of the directories above it let `who` read (4), write (2) or execute (1) it.

    For our own user the kernel is asked. For another one the mode bits decide, and access control lists get the
    benefit of the doubt. True when the path cannot be examined: then the engine's own error is the better one.
    """
    if who.uid == os.geteuid():
        return os.access(path, want)
    real = os.path.realpath(path)
    if not all(_mode_allows(who, str(directory), os.X_OK) for directory in PurePath(real).parents):
        return False
    return _mode_allows(who, real, want)


def _account(found: pwd.struct_passwd) -> Account:
    groups = frozenset(os.getgrouplist(found.pw_name, found.pw_gid))
    return Account(found.pw_name, found.pw_uid, found.pw_gid, found.pw_dir, found.pw_shell, groups)


def _mode_allows(who: Account, path: str, want: int) -> bool:
    try:
        status = os.stat(path)  # noqa: PTH116 (many of them, at every start)
        if _bits_for(who, status) & want == want:
            return True
        return _ACL in os.listxattr(path)
    except OSError:
        return True


def _bits_for(who: Account, status: os.stat_result) -> int:
    """The three permission bits that count for this user."""
    mode = status.st_mode
    if who.uid == 0:
        executable = stat.S_ISDIR(mode) or mode & 0o111
        return 7 if executable else 6
    if who.uid == status.st_uid:
        return mode >> 6 & 7
    return mode >> 3 & 7 if status.st_gid in who.groups else mode & 7
