"""Which configuration a starting daemon uses: the one in the files, or, while engines live, the last that was applied.

A bad edit, or a downgrade to a release that does not know a key, must not leave running engines without supervision.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from supervisord.config import ConfigError, load, parse
from supervisord.core.spec import NodeSpec
from supervisord.engine import profiles
from supervisord.engine.profiles import Profiles
from supervisord.launcher import choice
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
    """Read the configuration of a starting daemon. Raises ConfigError when it is refused and no engine lives."""
    folder = config_path.absolute().parent
    try:
        # Without the files: a model on a disk that is not mounted yet must not keep the other engines down.
        loaded = load(config_path, trust=trust, check_files=False)
        return Chosen(loaded.spec, profiles.load(folder, trust=trust), loaded.warnings, loaded.tables)
    except ConfigError as error:
        for state_dir in _live_state_dirs():
            spec = read(state_dir)
            if spec is not None:
                text = "the configuration is refused, and the last one that was applied is used: "
                return Chosen(spec, _profiles(folder, trust=trust), error=text + "; ".join(map(str, error.problems)))
        raise


def save(state_dir: Path, tables: Mapping[str, Any]) -> None:
    """Keep a configuration that is applied now; for root alone, since it may hold secrets. Raises OSError."""
    data = json.dumps({"version": VERSION, "tables": tables}).encode()
    write_atomically(state_dir / _FILE, data)


def read(state_dir: Path) -> NodeSpec | None:
    """The last configuration that was applied; None when there is none that can be used."""
    try:
        with (state_dir / _FILE).open("rb") as file:
            document = json.loads(file.read(_MAX_BYTES))
        if document["version"] != VERSION or not isinstance(document["tables"], dict):
            return None
        return parse(document["tables"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError, ConfigError):
        return None


def _live_state_dirs() -> list[Path]:
    """Where the daemons of the engines that run as services keep their state: the engines say so themselves."""
    if not choice.under_systemd():
        return []
    from supervisord.launcher.systemd import state_dirs  # noqa: PLC0415 (costs memory that only this case needs)

    return [path for text in state_dirs() if (path := Path(text)).is_absolute()]


def _profiles(folder: Path, *, trust: bool) -> Profiles:
    try:
        return profiles.load(folder, trust=trust)
    except ConfigError:
        return Profiles(profiles.shipped())
