"""The libraries inside the package: exactly what requirements/runtime.lock says, for every Python that it serves.

One tree serves them all: what is pure Python is the same everywhere, and the one compiled library has the stable ABI.
Files are taken out of the locked archives as they are; nothing of them is run or built.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from pip._vendor.packaging.markers import Marker

PYTHONS: Final = ("3.10", "3.11", "3.12", "3.13", "3.14")
MACHINES: Final = {"amd64": "x86_64", "arm64": "aarch64"}
"""Debian's names of architectures, and Python's."""

COMPILED: Final = frozenset({"psutil"})
SOURCE_ONLY: Final = frozenset({"sdnotify"})
"""Pure Python that is published as a source archive alone."""

STRAY: Final = frozenset({"example.py"})
"""What nvidia-ml-py puts among everybody's modules."""

_LINE: Final = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;]+)(?:\s*;\s*(?P<marker>[^\\]+?))?\s*(?=\\|$)")
_METADATA: Final = ("METADATA", "entry_points.txt")


class Library(NamedTuple):
    """A line of the lock. `pinned` is that line for pip, with its hashes and without its marker."""

    name: str
    version: str
    pinned: str


def locked(lock: str, machine: str) -> list[Library]:
    """Read the libraries of a lock that any of the Pythons needs on this machine."""
    libraries = []
    text = "\n".join(line for line in lock.splitlines() if not line.startswith("#"))
    for entry in re.split(r"\n(?=\S)", text.strip()):
        found = _LINE.match(entry)
        if found is None:
            raise ValueError(f"cannot read the lock at {entry.splitlines()[0]!r}: run scripts/lock")
        if found["marker"] is None or any(_applies(found["marker"], python, machine) for python in PYTHONS):
            hashes = re.findall(r"--hash=\S+", entry)
            pinned = " ".join([f"{found['name']}=={found['version']}", *hashes])
            libraries.append(Library(found["name"], found["version"], pinned))
    return libraries


def _applies(marker: str, python: str, machine: str) -> bool:
    here = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "os_name": "posix",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": machine,
    }
    return Marker(marker).evaluate(here)


def archives(libraries: list[Library], machine: str, cache: Path) -> list[Path]:
    """Give the archive of each library, fetched once and kept in a cache; hashes are checked each time.

    Raises CalledProcessError when pip cannot fetch them, ValueError when one is not what the lock says.
    """
    wanted = "\n".join(library.pinned for library in libraries)
    kept = cache / "archives" / hashlib.sha256(f"{machine}\n{wanted}".encode()).hexdigest()[:16]
    if not kept.is_dir():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            download(libraries, machine, Path(folder) / "new")
            with contextlib.suppress(OSError):  # another build was faster
                (Path(folder) / "new").rename(kept)
    found = sorted(kept.iterdir())
    if len(found) != len(libraries):
        raise ValueError(f"cannot use {kept}: {len(found)} archives for {len(libraries)} libraries; remove that folder")
    for archive in found:
        if f"--hash=sha256:{hashlib.sha256(archive.read_bytes()).hexdigest()}" not in wanted.split():
            raise ValueError(f"cannot use {archive}: the lock does not know its hash; remove that folder")
    return found


def download(libraries: list[Library], machine: str, folder: Path) -> None:
    """Fetch the archive of each library into a folder. Raises CalledProcessError."""
    pure = ("--only-binary=:all:", "--platform=any", "--implementation=py", "--abi=none")
    compiled = ("--only-binary=:all:", f"--platform=manylinux2014_{machine}", "--implementation=cp", "--abi=abi3")
    sources = tuple(f"--no-binary={name}" for name in sorted(SOURCE_ONLY))
    for library in libraries:
        options = compiled if library.name in COMPILED else sources if library.name in SOURCE_ONLY else pure
        python = () if options is sources else (f"--python-version={PYTHONS[0]}",)
        command = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps")
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".txt") as line:
            line.write(library.pinned)
            line.flush()
            subprocess.run([*command, "--require-hashes", "-r", line.name, "-d", folder, *options, *python], check=True)


def unpacked(found: list[Path]) -> Iterator[tuple[str, bytes]]:
    """All that Python imports, and what it asks of metadata, by its name in one tree; licences stay beside it."""
    for archive in found:
        yield from _wheel(archive) if archive.suffix == ".whl" else _source(archive)


def _wheel(archive: Path) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(archive) as wheel:
        for entry in wheel.infolist():
            path = PurePosixPath(entry.filename)
            if entry.is_dir() or entry.filename in STRAY:
                continue
            if path.parts[0].endswith(".dist-info") and not (path.name in _METADATA or _is_licence(path)):
                continue
            yield entry.filename, wheel.read(entry)


def _source(archive: Path) -> Iterator[tuple[str, bytes]]:
    stem = archive.name.removesuffix(".tar.gz")
    name = stem.rpartition("-")[0]
    with tarfile.open(archive) as source:
        for member in source.getmembers():
            path = PurePosixPath(member.name)
            content = source.extractfile(member)
            inner = path.parts[1:]
            if content is None or not inner:
                continue
            if inner[0] == name:
                yield str(PurePosixPath(*inner)), content.read()
            elif inner == ("PKG-INFO",):
                yield f"{stem}.dist-info/METADATA", content.read()
            elif _is_licence(path):
                yield f"{stem}.dist-info/{path.name}", content.read()


def _is_licence(path: PurePosixPath) -> bool:
    return re.match(r"(LICEN[CS]E|COPYING|NOTICE)", path.name, re.IGNORECASE) is not None
