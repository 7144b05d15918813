"""Which configuration a starting daemon uses: the one in the files, or, while engines live, the last that was applied.

A bad edit, or a downgrade to a release that does not know a key, must not leave running engines without supervision.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from supervisord import config_trust
from supervisord.config import ConfigError, load, parse
from supervisord.config_problems import Problem
from supervisord.core.spec import NodeSpec
from supervisord.engine import profiles
from supervisord.engine.profiles import Profiles
from supervisord.launcher import choice, plain
from supervisord.launcher.statedir import is_taken
from supervisord.state import write_atomically

VERSION: Final = 1
_FILE: Final = "applied.json"
_MAX_BYTES: Final = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Chosen:
    """`tables` are None and `error` says why when the files were refused."""

    spec: NodeSpec
    profiles: Profiles
    warnings: tuple[str, ...] = ()
    tables: Mapping[str, Any] | None = None
    error: str | None = None


def choose(config_path: Path, *, trust: bool) -> Chosen:
    """Read the configuration of a starting daemon. Raises ConfigError when it is refused and no engine lives.

    It says so too when engines live, and what was applied last cannot be used for them.
    """
    folder = config_path.absolute().parent
    try:
        # Without the files: a model on a disk that is not mounted yet must not keep the other engines down.
        loaded = load(config_path, trust=trust, check_files=False)
        return Chosen(loaded.spec, profiles.load(folder, trust=trust), loaded.warnings, loaded.tables)
    except ConfigError as error:
        unwatched = []
        for state_dir, engines in _living(trust=trust):
            try:
                spec = read(state_dir, config_path)
            except UnusableError as why:
                unwatched.append(_unwatched(state_dir, engines, str(why)))
                continue
            if spec is not None:
                text = "the configuration is refused, and the last one that was applied is used: "
                return Chosen(spec, _profiles(folder, trust=trust), error=text + "; ".join(map(str, error.problems)))
        raise ConfigError((*error.problems, *unwatched)) from error


def _unwatched(state_dir: Path, engines: list[str], why: str) -> Problem:
    text = f"cannot watch {', '.join(engines)}, left running: {state_dir / _FILE}, what was applied last: {why}"
    remedy = "mend the configuration and start the daemon again: it takes them over"
    return Problem(file=str(state_dir / _FILE), path="", value=None, message=text, remedy=remedy)


def save(state_dir: Path, tables: Mapping[str, Any], config_path: Path) -> None:
    """Keep a configuration that is applied now; for root alone, since it may hold secrets. Raises OSError."""
    document = {"version": VERSION, "config": str(config_path.absolute()), "tables": tables}
    write_atomically(state_dir / _FILE, json.dumps(document).encode())


class UnusableError(Exception):
    """What is kept as the last configuration cannot be used."""


def read(state_dir: Path, config_path: Path) -> NodeSpec | None:
    """The last configuration that was applied; None when it came from another file. Raises UnusableError."""
    try:
        with (state_dir / _FILE).open("rb") as file:
            document = json.loads(file.read(_MAX_BYTES))
        if document["version"] != VERSION or not isinstance(document["tables"], dict):
            raise UnusableError(f"its version is {document['version']!r:.80}")
        here = str(config_path.absolute())
        # The first builds did not say which file it came from.
        return parse(document["tables"]) if document.get("config", here) == here else None
    except OSError as error:
        raise UnusableError(error.strerror) from None
    except ConfigError as error:
        raise UnusableError(f"this version refuses it: {'; '.join(map(str, error.problems))}") from None
    except (AttributeError, ValueError, TypeError, KeyError, RecursionError):
        raise UnusableError("it is damaged, or of another version") from None


def _living(*, trust: bool) -> Iterator[tuple[Path, list[str]]]:
    """The state directories of engines that live and that no daemon watches, and these.

    Services and processes name it themselves. A process can be anybody's: root believes only a directory that nobody
    else could have made.
    """
    if choice.under_systemd():
        from supervisord.launcher import systemd  # noqa: PLC0415 (costs memory that only this case needs)

        for text, engines in systemd.living():
            if Path(text).is_absolute() and not is_taken(Path(text)):
                yield Path(text), engines
    for text in plain.state_dirs():
        if Path(text).is_absolute() and _is_own(text, trust=trust) and not is_taken(Path(text)):
            engines = plain.living(Path(text))
            if engines:
                yield Path(text), engines


def _is_own(state_dir: str, *, trust: bool) -> bool:
    try:
        return config_trust.distrust(state_dir) is None if trust else Path(state_dir).stat().st_uid == os.geteuid()
    except OSError:
        return False


def _profiles(folder: Path, *, trust: bool) -> Profiles:
    try:
        return profiles.load(folder, trust=trust)
    except ConfigError:
        return Profiles(profiles.shipped())
