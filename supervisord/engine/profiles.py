"""Launch profiles: flags by generation and class of the GPUs and by size of the model, under the operator's own.

The shipped ones are in profiles.toml beside this file, an operator's in profiles.toml beside the configuration.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from supervisord.config_checks import valid_engine_name
from supervisord.config_flags import flag_name
from supervisord.config_problems import ConfigError, Finding, Problem, nearest, path_text, printable, shown
from supervisord.config_reader import Reader
from supervisord.config_trust import distrust
from supervisord.core.gpu_kinds import CLASSES, GENERATIONS, GpuKind
from supervisord.core.spec import EngineSpec, FlagValue, key
from supervisord.engine.flag_checks import Target, name_and_value
from supervisord.engine.version import Version

FILE: Final = "profiles.toml"
SIZES: Final = ("small", "medium", "large")

_SMALL_B: Final = 10.0
_MEDIUM_B: Final = 40.0
"""Up to so many billions of parameters."""
_BILLIONS: Final = re.compile(r"(?<![A-Za-z0-9.])(?:(\d{1,3})x)?(\d{1,4}(?:\.\d{1,3})?)b(?![A-Za-z0-9])", re.IGNORECASE)
_MAX_BYTES: Final = 1 << 20
_RESERVED: Final = ("auto", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One table of a profiles.toml. `file`: which; "" for a shipped one."""

    name: str = field(metadata={"internal": True})
    file: str = field(metadata={"internal": True})
    generations: tuple[str, ...] = key("generations of GPUs that it is for; [] = all", ())
    classes: tuple[str, ...] = key("classes of GPUs that it is for; [] = all", ())
    sizes: tuple[str, ...] = key("sizes of models that it is for; [] = all", ())
    since: str = key("first release of vLLM that it is for", "")
    unless: tuple[str, ...] = key("it is left out when the operator gives one of these flags", ())
    auto: bool = key('profile = "auto" considers it', default=True)
    base: Literal["none", "auto"] = key("what it is merged over when an engine names it", "none")
    args: Mapping[str, FlagValue] = field(
        default_factory=dict, metadata={"doc": "flags of vllm serve, without dashes, as in [engine.X.args]"}
    )

    @property
    def source(self) -> str:
        """Where it comes from, in words."""
        return f"profile {self.name} ({self.file or 'shipped'})"


@dataclass(frozen=True, slots=True)
class Choice:
    """What a profile gives to an engine: flags with the table that each comes from, the tables used, and remarks.

    `finding`: the engine names a profile that does not exist; `problems`: an operator's tables that cannot be used.
    """

    args: Mapping[str, tuple[FlagValue, Profile]]
    used: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    finding: Finding | None = None
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class Profiles:
    """All profiles, the shipped ones first; an operator's replaces the shipped one of its name, in place."""

    tables: tuple[Profile, ...]

    def identity(self, spec: EngineSpec) -> str | None:
        """Changes when an operator changes profiles that this engine may use; None when there are none of his.

        Shipped ones and the GPUs stay out: an upgrade of the supervisor must not restart running engines.
        """
        own = [profile for profile in self._candidates(spec) if profile.file]
        return hashlib.sha256(repr(own).encode()).hexdigest() if own else None

    def choose(self, spec: EngineSpec, target: Target) -> Choice:
        """The flags for an engine, without those that its operator sets."""
        named = self._named(spec)
        if spec.profile not in _RESERVED and named is None:
            names = [profile.name for profile in self.tables] + list(_RESERVED)
            near = nearest(spec.profile, names)
            remedy = f"did you mean {near}?" if near else f"known here: {', '.join(names)}"
            at = ("engine", spec.name, "profile")
            return Choice({}, finding=Finding(at, "there is no such profile", remedy, shown(spec.profile)))
        candidates = self._candidates(spec)
        given = _given(spec, target)
        if candidates and "config" in given:
            return Choice({}, notes=("none: its flags are in the file of --config, which a profile would override",))
        notes = []
        if target.gpus is None and any(profile is not named for profile in candidates):
            notes.append("the kind of the GPUs is not known here: only what holds for all GPUs")
        size = size_of(spec.model)
        fitting = [p for p in candidates if p is named or _fits(p, target.gpus, size)]
        fitting = [p for p in fitting if _recent(p, target.version) and given.isdisjoint(p.unless)]
        args = {
            flag: (value, profile)
            for profile in fitting
            for flag, value in profile.args.items()
            if given.isdisjoint({flag, f"no-{flag}", flag.removeprefix("no-")})
        }
        return _checked(args, target, notes)

    def _named(self, spec: EngineSpec) -> Profile | None:
        return next((profile for profile in self.tables if profile.name == spec.profile), None)

    def _candidates(self, spec: EngineSpec) -> list[Profile]:
        """Those that the key `profile` of an engine lets in, whatever its GPUs are."""
        named = self._named(spec)
        automatic = spec.profile == "auto" or (named is not None and named.base == "auto")
        found = [
            profile for profile in self.tables if automatic and spec.gpus and profile.auto and profile is not named
        ]
        return found if named is None else [*found, named]


def load(folder: Path, *, trust: bool) -> Profiles:
    """The shipped profiles and those of `profiles.toml` in the directory of the configuration, if it is there.

    `trust`: the daemon is root, so only root may be able to change them. Raises ConfigError with every problem.
    """
    own: dict[str, Profile] = {}
    path = folder / FILE
    if (tables := _tables(path, trust=trust)) is not None:
        own = {profile.name: profile for profile in _parse(tables, str(path))}
    merged = [own.pop(profile.name, profile) for profile in shipped()]
    return Profiles((*merged, *own.values()))


@functools.cache
def shipped() -> tuple[Profile, ...]:
    """The profiles of this release."""
    tables = _toml(Path(__file__).with_name(FILE).read_text(encoding="utf-8"))
    return tuple(_parse(tables, ""))


def size_of(model: str) -> str | None:
    """The size class of a model by the billions in its name: Qwen3-9B, mixtral-8x7b; None when it does not tell."""
    name = model.rstrip("/").rpartition("/")[2]
    billions = [int(times or 1) * float(number) for times, number in _BILLIONS.findall(name)]
    if not billions:
        return None
    return "small" if max(billions) <= _SMALL_B else "medium" if max(billions) <= _MEDIUM_B else "large"


# --- choosing ---------------------------------------------------------------------------------------------------------


def _given(spec: EngineSpec, target: Target) -> frozenset[str]:
    """The flags that an operator gives, under their first names; a switch that is off as no-NAME."""
    of_command = {flag_name(word[2:].partition("=")[0]): True for word in spec.command if word.startswith("--")}
    found = set()
    for name, value in {**of_command, **spec.args}.items():
        head = name.partition(".")[0]
        first = target.flags.canonical(head) if target.flags is not None else head
        found.add(f"no-{first}" if value is False else first)
    return frozenset(found)


def _fits(profile: Profile, gpus: Sequence[GpuKind] | None, size: str | None) -> bool:
    if profile.sizes and size not in profile.sizes:
        return False
    if not (profile.generations or profile.classes):
        return True
    return bool(gpus) and all(
        (not profile.generations or gpu.generation in profile.generations)
        and (not profile.classes or gpu.gpu_class in profile.classes)
        for gpu in gpus or ()
    )


def _recent(profile: Profile, version: str | None) -> bool:
    first = Version.parse(profile.since)
    installed = Version.parse(version) if version is not None else None
    return first is None or (installed is not None and installed >= first)


def _checked(args: dict[str, tuple[FlagValue, Profile]], target: Target, notes: list[str]) -> Choice:
    """Without what this vLLM does not take: a shipped profile gives way, an operator's is a mistake to be told."""
    kept = {}
    problems = []
    for flag, (value, profile) in args.items():
        at = (profile.name, "args", flag)
        found = name_and_value(flag, value, target, at)
        if found is None:
            kept[flag] = value, profile
        elif profile.file:
            problems.append(Problem(profile.file, path_text(at), found.value, found.message, found.remedy))
        else:
            notes.append(f"{flag} of {profile.name} is left out: {found.message}")
    used = tuple(dict.fromkeys(profile.name for _, profile in kept.values()))
    return Choice(kept, used, tuple(notes), problems=tuple(problems))


# --- reading ----------------------------------------------------------------------------------------------------------


def _tables(path: Path, *, trust: bool) -> dict[str, Any] | None:
    """The tables of an operator's file; None when there is none. Raises ConfigError."""
    try:
        distrusted = distrust(str(path)) if trust else None
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:  # noqa: PTH123 (a descriptor)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _cannot(path, "it is no regular file", "remove it")
            content = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _cannot(path, str(error.strerror), "correct its owner and mode") from None
    if distrusted is not None:
        reason = f"the daemon is root, and {distrusted.path} is not root's alone: {distrusted.reason}"
        raise _cannot(path, reason, distrusted.remedy, verb="trust")
    if len(content) > _MAX_BYTES:
        raise _cannot(path, f"it has more than {_MAX_BYTES} bytes", "shorten it")
    try:
        return _toml(content.decode())
    except (ValueError, RecursionError) as error:
        raise _cannot(path, printable(str(error)), "correct the TOML there") from None


def _cannot(path: Path, reason: str, remedy: str, verb: str = "read") -> ConfigError:
    return ConfigError([Problem(str(path), "", None, f"cannot {verb} {path}: {reason}", remedy)])


def _toml(text: str) -> dict[str, Any]:
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    tables: dict[str, Any] = tomllib.loads(text)
    return tables


def _parse(tables: Mapping[str, Any], file: str) -> list[Profile]:
    reader = Reader()
    profiles = []
    for name, table in tables.items():
        if not valid_engine_name(name) or name in _RESERVED:
            rule = "the name of a profile begins with a-z or 0-9, goes on with at most 31 of a-z, 0-9, _ and -, "
            reader.findings.append(Finding((name,), f"{rule}and is not auto or none", "rename it"))
        elif not isinstance(table, Mapping):
            reader.wrong((name,), table, "must be a table", f"write [{name}] above its keys")
        else:
            profile = reader.table(Profile, table, (name,), name=name, file=file)
            reader.findings.extend(_wrong_values(profile))
            profiles.append(profile)
    if reader.findings:
        raise ConfigError(
            Problem(file, path_text(found.at), found.value, found.message, found.remedy) for found in reader.findings
        )
    return profiles


def _wrong_values(profile: Profile) -> Iterator[Finding]:
    lists = (("generations", GENERATIONS), ("classes", CLASSES), ("sizes", SIZES))
    for name, known in lists:
        for value in getattr(profile, name):
            if value not in known:
                message = f"there is no such word for {name}"
                yield Finding((profile.name, name), message, f"known here: {', '.join(known)}", shown(value))
    if profile.since and Version.parse(profile.since) is None:
        at = (profile.name, "since")
        yield Finding(at, "it is no release", 'write for example "0.18"', shown(profile.since))
