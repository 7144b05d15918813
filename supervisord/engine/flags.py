"""The flags of an installed `vllm serve`: read from its own help text once per installation, and kept on disk.

Asking takes 9 s of imports on a quiet machine and minutes on a busy one (docs/decisions/009). It runs as the user of
the engine, without GPUs and network, bounded in time, memory and output. What it prints is untrusted text.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from supervisord.config_problems import looks_secret
from supervisord.config_users import ENGINE_USER, Account, account, own_account
from supervisord.core.spec import EngineSpec
from supervisord.engine import flags_ask, launch_env
from supervisord.engine.version import installed_version, interpreter, resolve_program
from supervisord.state import write_atomically

READ_S: Final = 100.0
"""For one installation: 9 to 14 s on a quiet machine, and a busy one was eight times slower."""
RETRY_S: Final = 3600.0
"""What could not be read is not asked again before this, unless the installation changes."""

_FORMAT: Final = 1
_CACHE_MAX_BYTES: Final = 1 << 20
_EVERY_RELEASE: Final = frozenset({"host", "port", "max-model-len", "gpu-memory-utilization", "tensor-parallel-size"})
"""A text without one of these is no full help: in 0.9 `--help=all` only searches for the word "all"."""
_ARGUMENT: Final = re.compile(r"  (-\S.*)")
_NAMES: Final = re.compile(r"(?:^|(?<=, ))(--?[A-Za-z0-9][A-Za-z0-9_.-]*)")
_ANOTHER_NAME: Final = re.compile(r", (?=-)")
_LONG_NAME: Final = re.compile(r"--[a-z0-9][a-z0-9._-]{0,79}", re.IGNORECASE)
_MOST_FLAGS: Final = Path("vllm/engine/arg_utils.py")

NOTHING, ONE, MAYBE, SEVERAL = "nothing", "one", "maybe", "several"


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. `takes`: how many values; `negative`: there is a --no-NAME; `choices`: the only values, if listed."""

    name: str
    takes: str
    negative: bool = False
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FlagSet:
    """The flags of one installation, by every name that they have, long ones without dashes, short ones with one."""

    version: str | None
    names: Mapping[str, Flag]

    def get(self, name: str) -> Flag | None:
        """The flag of this name (without dashes)."""
        return self.names.get(name)

    def canonical(self, name: str) -> str:
        """The first name of a flag that has several."""
        flag = self.names.get(name)
        return name if flag is None else flag.name


@dataclass(frozen=True, slots=True)
class Unread:
    """The flags are not known. `failed`: they were asked for, in vain; `stale`: asking may help."""

    reason: str
    failed: bool = False
    stale: bool = False


# --- reading a help text ----------------------------------------------------------------------------------------------


def parse_help(text: str, version: str | None = None) -> FlagSet | None:
    """The flags in the text of `--help=all` (0.9: of `--help`); None when it does not list all of them."""
    names: dict[str, Flag] = {}
    for line in text.splitlines():
        found = _ARGUMENT.fullmatch(line)
        if found is not None:
            head = found[1].partition("  ")[0]
            spelled = _NAMES.findall(head)
            flag = _flag(head, spelled)
            if flag is not None:
                names |= {name.removeprefix("--"): flag for name in spelled if _own_name(name, flag)}
    return FlagSet(version, names) if names.keys() >= _EVERY_RELEASE else None


def _own_name(name: str, flag: Flag) -> bool:
    """Whether it is a name of the flag; its negative is none."""
    return not (flag.negative and name.startswith("--no-") and name != f"--{flag.name}")


def _flag(head: str, spelled: list[str]) -> Flag | None:
    long_names = [name.removeprefix("--") for name in spelled if _LONG_NAME.fullmatch(name)]
    if not long_names:
        return None
    name = next((name for name in long_names if not name.startswith("no-")), long_names[0])
    ends = (found.end() for found in _NAMES.finditer(head))
    value = next((_ANOTHER_NAME.split(head[end:], 1)[0].strip() for end in ends if head.startswith(" ", end)), "")
    choices: tuple[str, ...] = ()
    if not value:
        takes = NOTHING
    elif value.endswith("...]"):
        takes = SEVERAL
    elif value.startswith("[") and not value.startswith("['"):
        takes = MAYBE
    else:
        takes = ONE
    if takes == ONE and value.startswith("{") and value.endswith("}"):
        choices = tuple(value[1:-1].split(","))
    return Flag(name, takes, f"no-{name}" in long_names, choices)


# --- the installations of this machine --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Installation:
    """A `vllm` script. `state` changes whenever the packages of its environment do."""

    program: str
    version: str | None
    state: str


class FlagBook:
    """What is known of the installations, in memory and in `<state_dir>/flags`, which every user may read.

    Safe to use from any thread.
    """

    def __init__(self, state_dir: Path, *, as_root: bool, base_env: Mapping[str, str]) -> None:
        self._state_dir = state_dir
        self._as_root = as_root
        self._base_env = base_env
        self._asking = threading.Lock()
        self._known: dict[_Installation, FlagSet] = {}
        self._failed: dict[_Installation, tuple[float, Unread]] = {}

    def known(self, spec: EngineSpec) -> FlagSet | Unread:
        """The flags of an engine's vLLM if they are at hand: a launch does not wait for them."""
        place = self._installation(spec)
        return place if isinstance(place, Unread) else self._at_hand(place)

    def read(self, spec: EngineSpec, timeout_s: float = READ_S) -> FlagSet | Unread:
        """The flags of an engine's vLLM, asked for if they are not at hand; that takes `timeout_s` at most."""
        place = self._installation(spec)
        if isinstance(place, Unread):
            return place
        deadline = time.monotonic() + timeout_s
        found = self._at_hand(place)
        if isinstance(found, FlagSet) or not found.stale:
            return found
        if not self._asking.acquire(timeout=timeout_s):
            return Unread("another read is still under way", failed=True, stale=True)
        try:
            found = self._at_hand(place)
            if isinstance(found, Unread) and found.stale:
                found = self._ask(spec, place, deadline)
        finally:
            self._asking.release()
        return found

    # --- what is at hand ----------------------------------------------------------------------------------------

    def _installation(self, spec: EngineSpec) -> _Installation | Unread:
        path = launch_env.search_path(spec, self._base_env)
        program = resolve_program(spec.command[0], path)
        if program is None:
            return Unread("it is not installed")
        python = interpreter(program, path)
        if python is None or Path(program).name != "vllm" or spec.command[1:2] != ("serve",):
            return Unread('only those of a command ["PATH/OF/vllm", "serve", ...] in a Python environment are known')
        return _Installation(program, installed_version(spec.command, path), _state_of(program, python))

    def _at_hand(self, place: _Installation) -> FlagSet | Unread:
        if (known := self._known.get(place)) is not None:
            return known
        if (kept := _load(self._file(place), place)) is not None:
            self._known[place] = kept
            return kept
        at, failure = self._failed.get(place, (0.0, None))
        if failure is not None and time.monotonic() - at < RETRY_S:
            return failure
        return Unread("they were not read yet", stale=True)

    def _file(self, place: _Installation) -> Path:
        name = hashlib.sha256(place.program.encode(errors="surrogateescape")).hexdigest()[:16]
        return self._state_dir / "flags" / f"{name}.json"

    # --- asking -------------------------------------------------------------------------------------------------

    def _ask(self, spec: EngineSpec, place: _Installation, deadline: float) -> FlagSet | Unread:
        found = self._answer(spec, place, deadline)
        if isinstance(found, FlagSet):
            self._known[place] = found
            # A cache that cannot be written costs the next reader some seconds, nothing else.
            with contextlib.suppress(OSError):
                _save(self._file(place), place, found)
        else:
            self._failed[place] = time.monotonic(), found
        return found

    def _answer(self, spec: EngineSpec, place: _Installation, deadline: float) -> FlagSet | Unread:
        who = self._user(spec)
        if who is None:
            return Unread("the user of the engine does not exist")
        env = self._environment(spec, who, place.program)
        for word in ("--help=all", "--help"):
            try:
                text = flags_ask.ask((place.program, "serve", word), env, who, deadline - time.monotonic())
            except flags_ask.NoAnswerError as error:
                return Unread(f"{place.program} serve {word}: {error}", failed=True)
            if (found := parse_help(text, place.version)) is not None:
                return found
        return Unread(f"{place.program} serve --help does not list them", failed=True)

    def _user(self, spec: EngineSpec) -> Account | None:
        """Whom to ask as. A caller who is not root can only be himself."""
        if not self._as_root or os.geteuid() != 0:
            return own_account()
        return account(spec.user or ENGINE_USER)

    def _environment(self, spec: EngineSpec, who: Account, program: str) -> dict[str, str]:
        kept = launch_env.inherited(self._base_env, other_user=who.uid != os.geteuid())
        ours = {name: value for name, value in {**kept, **spec.env}.items() if not looks_secret(name)}
        of_account = {"HOME": who.home, "USER": who.name, "LOGNAME": who.name, "SHELL": who.shell}
        path = launch_env.program_path(launch_env.search_path(spec, self._base_env), program)
        return {**of_account, **ours, "PATH": path, **flags_ask.QUIET}


def _state_of(program: str, python: str) -> str:
    """Times of what an installer touches: the script, the packages, and where most flags are defined."""
    libraries = sorted(Path(python).parent.parent.glob("lib*/python3*/site-packages"))
    files = [Path(program), *(place for library in libraries for place in (library, library / _MOST_FLAGS))]
    return " ".join(str(time_ns) for file in files for time_ns in _modified(file))


def _modified(file: Path) -> Iterator[int]:
    with contextlib.suppress(OSError):
        yield file.stat().st_mtime_ns


# --- the cache --------------------------------------------------------------------------------------------------------


def _save(path: Path, place: _Installation, flags: FlagSet) -> None:
    """Write it if the state directory is ours: whoever else owns that could lead us anywhere. Raises OSError."""
    if path.parent.parent.stat().st_uid != os.geteuid():
        return
    path.parent.mkdir(mode=0o755, exist_ok=True)
    path.parent.chmod(0o755)
    kept = {name: [flag.name, flag.takes, flag.negative, flag.choices] for name, flag in flags.names.items()}
    document = {"format": _FORMAT, **_identity(place), "flags": kept}
    write_atomically(path, json.dumps(document).encode(), mode=0o644)
    path.chmod(0o644)


def _load(path: Path, place: _Installation) -> FlagSet | None:
    """The flags of exactly this installation; None when there is no such file, or it makes no sense."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:  # noqa: PTH123 (a descriptor)
            if os.fstat(descriptor).st_uid not in {0, os.geteuid()}:
                return None
            document = json.loads(file.read(_CACHE_MAX_BYTES))
        if document["format"] != _FORMAT or any(document[key] != value for key, value in _identity(place).items()):
            return None
        names = {name: _flag_of(kept) for name, kept in document["flags"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return FlagSet(place.version, names) if names.keys() >= _EVERY_RELEASE else None


def _flag_of(kept: Any) -> Flag:
    name, takes, negative, choices = kept
    if takes not in {NOTHING, ONE, MAYBE, SEVERAL}:
        raise ValueError(takes)
    return Flag(str(name), takes, bool(negative), tuple(map(str, choices)))


def _identity(place: _Installation) -> dict[str, Any]:
    return {"program": place.program, "version": place.version, "state": place.state}
