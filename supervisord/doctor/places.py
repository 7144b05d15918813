"""Checks of accounts, directories, room on disks, shared memory and descriptors."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from supervisord.config_users import ENGINE_USER, Account, may
from supervisord.core.spec import EngineSpec
from supervisord.doctor.box import hidden, whole
from supervisord.doctor.facts import Facts, Unknown
from supervisord.doctor.findings import Finding, fail, listed, not_checked, ok, warn
from supervisord.launcher.preparing import FREE_BYTES_MIN
from supervisord.launcher.spawn import OPEN_FILES

MIB: Final = 1024**2
GIB: Final = 1024**3

ROOM_WARN_BYTES: Final = 10 * GIB
"""A compile cache takes 0.1 to 2 GiB, a model of the hub what its weights weigh."""
SHM_FAIL_BYTES: Final = 128 * MIB
"""Containers get 64 MiB by default, with which NCCL and the processes of one engine cannot talk to each other."""
SHM_WARN_BYTES: Final = GIB

_ADMINS: Final = "vllm-admin"
_SHM: Final = "/dev/shm"  # noqa: S108 (looked at)
_CACHES: Final = (
    ("HF_HOME", ".cache/huggingface"),
    ("VLLM_CACHE_ROOT", ".cache/vllm"),
    ("TRITON_CACHE_DIR", ".triton"),
    ("FLASHINFER_WORKSPACE_BASE", ".cache/flashinfer"),
)
"""Where an engine keeps models and what it compiled: a variable, or a place below its home."""


def users(facts: Facts) -> Iterator[Finding]:
    """Whether the accounts of engines are there."""
    if not facts.engines:
        return
    seen: dict[str, Account | None] = {}
    for spec in facts.engines:
        seen.setdefault(spec.user or ENGINE_USER if facts.as_root else "", facts.user_of(spec))
    for name, who in seen.items():
        if who is None:
            remedy = f"useradd --system --create-home --home-dir /var/lib/{name} {name}"
            yield fail(f"there is no user {name}", remedy)
        elif facts.box.group(_ADMINS) in who.groups and who.uid != 0:
            text = f"user {who.name} is in {_ADMINS}: code that a model brings may command the supervisor"
            yield warn(text, f"gpasswd -d {who.name} {_ADMINS}")
        elif who.uid == 0 and facts.as_root:
            yield warn(
                "engines run as root: code that a model brings owns the machine", "give them a user of their own"
            )
        else:
            yield ok(f"user {who.name} (uid {who.uid})")


def homes(facts: Facts) -> Iterator[Finding]:
    """Whether each user of engines can write its home, where caches are."""
    for who, specs in _by_user(facts):
        homes = dict.fromkeys(spec.env.get("HOME") or who.home for spec in specs)
        for home in homes:
            if hidden(home):
                yield not_checked(f"this user may not look at {home}", "run this as root")
            elif not os.path.isdir(home):  # noqa: PTH112 (text)
                remedy = f"install -d -m 0750 -o {who.name} {home}"
                yield fail(f"the home of user {who.name}, {home}, is not there: vLLM keeps its caches in it", remedy)
            elif not may(who, home, os.W_OK | os.X_OK):
                yield fail(f"user {who.name} cannot write its home {home}", _own_home(who, home))
            else:
                yield ok(f"home of user {who.name}: {home}")


def caches(facts: Facts) -> Iterator[Finding]:
    """Whether each user of engines can write its caches, and execute what was compiled into them."""
    for who, specs in _by_user(facts):
        places = {place: None for spec in specs for place in _caches(spec, who)}
        closed = [place for place in places if not may(who, _existing(place), os.W_OK | os.X_OK)]
        rigid = [place for place in places if _flags(_existing(place)) & os.ST_NOEXEC]
        for place in closed:
            # What is above it belongs to others too: only the place itself may change hands.
            made = os.path.isdir(place)  # noqa: PTH112 (no errors)
            remedy = f"chown -R {who.name} {place}" if made else f"install -d -o {who.name} {place}"
            yield fail(f"user {who.name} cannot write {place}", remedy)
        for place in rigid:
            text = f"{place} is on a disk mounted noexec: what was compiled at run time cannot be loaded from there"
            yield fail(text, f"mount -o remount,exec {_mount_point(place)}, or set the variable of that cache in env")
        if not closed and not rigid:
            yield ok(f"user {who.name} can write {listed(places)}")


def state_dir(facts: Facts) -> Iterator[Finding]:
    """Whether the daemon can use its state directory, and engines get through it to theirs."""
    place = facts.node.supervisor.state_dir
    if not facts.whole:
        yield not_checked("the configuration says where it is, and cannot be read (check configuration)")
        return
    try:
        status = os.stat(place)  # noqa: PTH116 (text)
    except FileNotFoundError:
        yield ok(f"{place} is made at the daemon's first start")
        return
    except OSError as error:
        yield not_checked(f"{place}: {error.strerror}", "run this as root")
        return
    if facts.as_root and status.st_uid != 0:
        yield fail(f"{place} belongs to uid {status.st_uid}, and the daemon is root", f"chown root {place}")
    elif not facts.as_root and not os.access(place, os.W_OK | os.X_OK):
        yield fail(f"{place} cannot be written", "correct supervisor.state_dir, or its owner")
    elif _flags(place) & os.ST_NOEXEC:
        remedy = f"mount -o remount,exec {_mount_point(place)}"
        yield fail(f"{place} is on a disk mounted noexec; temporary directories of engines are in it", remedy)
    elif _flags(place) & os.ST_RDONLY:
        yield fail(f"{place} is on a disk mounted read-only", "dmesg | grep -i remount; mount -o remount,rw")
    else:
        barred = [who for who, _ in _by_user(facts) if not may(who, place, os.X_OK)]
        for who in barred:
            yield _barred(who, place)
        if not barred:
            yield ok(place)


def _barred(who: Account, place: str) -> Finding:
    """Of all directories on the way the first that is closed."""
    way = [*reversed(Path(place).parents), Path(place)]
    closed = next((str(path) for path in way if not may(who, str(path), os.X_OK)), place)
    text = f"user {who.name} may not pass {closed} to its temporary directory"
    if closed == place:
        return fail(text, f"chmod 0711 {place}")
    return fail(f"{text} below {place}", f"set supervisor.state_dir to a place below /var/lib, or: chmod o+x {closed}")


def disks(facts: Facts) -> Iterator[Finding]:
    """Room where state, temporary files, caches and compiled kernels go."""
    wanted = {facts.node.supervisor.state_dir: "state and temporary files"}
    for who, specs in _by_user(facts):
        wanted |= {place: "caches and models" for spec in specs for place in _caches(spec, who)}
    disks: dict[int, tuple[str, str]] = {}
    for place, what in wanted.items():
        here = _existing(place)
        try:
            disks.setdefault(os.stat(here).st_dev, (here, what))  # noqa: PTH116 (text)
        except OSError:
            continue
    for place, what in disks.values():
        yield _room(place, what)


def _room(place: str, what: str) -> Finding:
    try:
        found = os.statvfs(place)
    except OSError as error:
        return not_checked(f"{place}: {error.strerror}")
    free, inodes = found.f_bavail * found.f_frsize, found.f_favail
    text = (
        f"{free / GIB:.1f} of {found.f_blocks * found.f_frsize / GIB:.0f} GiB are free on the disk of {place} ({what})"
    )
    if free < FREE_BYTES_MIN:
        return fail(
            f"{text}; no engine is started below {FREE_BYTES_MIN // MIB} MiB", f"free some space: du -xh {place}"
        )
    if found.f_files and not inodes:
        return fail(f"no inodes are free on the disk of {place} ({what})", f"remove files: du -x --inodes {place}")
    if free < ROOM_WARN_BYTES:
        return warn(text, f"free some space: du -xh {place}, or move it to a larger disk")
    return ok(text)


def shared_memory(facts: Facts) -> Iterator[Finding]:
    """Where the processes of one engine talk to each other."""
    place = facts.box.path(_SHM)
    try:
        found = os.statvfs(place)
    except OSError as error:
        yield fail(
            f"{_SHM} cannot be used: {error.strerror}", "mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs /dev/shm"
        )
        return
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    text = f"{_SHM} has {size / GIB:.1f} GiB, {free / GIB:.1f} of them free"
    remedy = "mount -o remount,size=50% /dev/shm (in a container: --shm-size or --ipc=host)"
    if size < SHM_FAIL_BYTES:
        yield fail(f"{text}: too little for the processes of an engine", remedy)
    elif free < SHM_WARN_BYTES:
        yield warn(
            text, f"ls -la /dev/shm shows what fills it (psm_*, vllm_offload_* of engines that are gone); {remedy}"
        )
    else:
        yield ok(text)


def descriptors(facts: Facts) -> Iterator[Finding]:
    """How many files an engine may have open."""
    limit, whose = _open_files(facts)
    if limit is None:
        yield ok("engines are services of systemd, which get what they need")
    elif limit < OPEN_FILES:
        remedy = f"LimitNOFILE={OPEN_FILES} in the unit (systemctl edit vllm-supervisor), or ulimit -Hn {OPEN_FILES}"
        yield warn(f"{whose} may have {limit} files open, and gives engines no more; {OPEN_FILES} are wanted", remedy)
    else:
        yield ok(f"{whose} may have {limit} files open")


def _open_files(facts: Facts) -> tuple[int | None, str]:
    """The hard limit that engines inherit, and from whom; None: from nobody."""
    if not isinstance(facts.daemon, Unknown):
        if facts.daemon["supervisor"].get("launcher") == "systemd":
            return None, ""
        limits = facts.box.text(f"/proc/{facts.daemon['supervisor'].get('pid')}/limits") or ""
        line = next((line for line in limits.splitlines() if line.startswith("Max open files")), "")
        hard = line.split()[-2:-1]
        if hard:
            return _or_unlimited(whole(hard[0])), "the daemon"
    if not isinstance(facts.unit, Unknown):
        stated = facts.unit.get("LimitNOFILE", "")
        if facts.unit.get("LoadState") == "loaded" and stated:
            return _or_unlimited(whole(stated)), "the unit"
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return (OPEN_FILES if hard_limit == resource.RLIM_INFINITY else hard_limit), "a daemon started from here"


def _or_unlimited(limit: int | None) -> int:
    return OPEN_FILES if limit is None else limit


def _by_user(facts: Facts) -> list[tuple[Account, list[EngineSpec]]]:
    """Users of engines that exist, each with its engines."""
    found: dict[int, tuple[Account, list[EngineSpec]]] = {}
    for spec in facts.engines:
        who = facts.user_of(spec)
        if who is not None:
            found.setdefault(who.uid, (who, []))[1].append(spec)
    return list(found.values())


def _own_home(who: Account, home: str) -> str:
    """Homes of system accounts are often / or /usr/sbin, which must stay root's."""
    if Path(home).name == who.name:
        return f"chown {who.name} {home}"
    own = f"/var/lib/{who.name}"
    return f"install -d -m 0750 -o {who.name} {own}; usermod -d {own} {who.name} (or set HOME in env)"


def _caches(spec: EngineSpec, who: Account) -> list[str]:
    home = spec.env.get("HOME") or who.home
    xdg = spec.env.get("XDG_CACHE_HOME")
    places = []
    for variable, below in _CACHES:
        default = Path(xdg, below.removeprefix(".cache/")) if xdg and below.startswith(".cache/") else Path(home, below)
        places.append(spec.env.get(variable) or str(default))
    return places


def _existing(place: str) -> str:
    """The nearest directory that is there: what is missing is made below it."""
    path = Path(os.path.abspath(place))  # noqa: PTH100 (links stay)
    return str(next((one for one in (path, *path.parents) if os.path.exists(one)), Path("/")))  # noqa: PTH110 (no errors)


def _mount_point(place: str) -> str:
    """Where the disk of a place is mounted."""
    path = Path(os.path.realpath(_existing(place)))
    return str(next(one for one in (path, *path.parents) if os.path.ismount(one)))


def _flags(place: str) -> int:
    try:
        return os.statvfs(place).f_flag
    except OSError:
        return 0
