"""Builds the Debian package. scripts/build-deb runs it; it needs dpkg-deb, and the first time pip with a network.

usage: python scripts/deb_build.py [--out DIR] [--version VERSION] [--architecture ARCH]

The same commit gives the same bytes on the same system: times are those of packaging/deb/changelog (or
SOURCE_DATE_EPOCH), owners are root, files are sorted, and the libraries are taken from archives that the lock names by
their hashes.
"""

from __future__ import annotations

import argparse
import email.utils
import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
DEB: Final = ROOT / "packaging/deb"
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import cli_texts  # noqa: E402 - its folder is not on the path before
import config_texts  # noqa: E402 - the same
import deb_libraries  # noqa: E402 - the same

from supervisord import __version__  # noqa: E402 - the same

LIB: Final = "usr/lib/vllm-supervisor"
SHARE: Final = "usr/share/vllm-supervisor"
DOC: Final = "usr/share/doc/vllm-supervisor"
MAINTAINER: Final = ("postinst", "prerm", "postrm")
PACKAGE_FILES: Final = frozenset({".py", ".toml", ".json", ".typed"})

FILES: Final = (
    # (in the repository, in the package, mode)
    ("packaging/deb/launcher", "usr/bin/vllm-supervisor", 0o755),
    ("packaging/deb/config.toml", "etc/vllm-supervisor/config.toml", 0o640),
    ("packaging/deb/rtupdate", "usr/share/python3/runtime.d/vllm-supervisor.rtupdate", 0o755),
    ("packaging/deb/copyright", f"{DOC}/copyright", 0o644),
    ("packaging/deb/lintian-overrides", "usr/share/lintian/overrides/vllm-supervisor", 0o644),
    ("units/vllm-supervisor.service", "usr/lib/systemd/system/vllm-supervisor.service", 0o644),
    ("units/vllm.slice", "usr/lib/systemd/system/vllm.slice", 0o644),
    ("units/vllm-supervisor.sysusers", "usr/lib/sysusers.d/vllm-supervisor.conf", 0o644),
    ("units/vllm-supervisor.tmpfiles", "usr/lib/tmpfiles.d/vllm-supervisor.conf", 0o644),
    ("units/vllm-supervisor.needrestart", "etc/needrestart/conf.d/vllm-supervisor.conf", 0o644),
    ("packaging/vllm-supervisor.catalog", "usr/lib/systemd/catalog/vllm-supervisor.catalog", 0o644),
    ("packaging/prometheus/vllm-supervisor.rules.yml", f"{SHARE}/prometheus/vllm-supervisor.rules.yml", 0o644),
    ("packaging/grafana/vllm-supervisor.json", f"{SHARE}/grafana/vllm-supervisor.json", 0o644),
    ("scripts/install-vllm", f"{SHARE}/scripts/install-vllm", 0o755),
    ("scripts/lib.sh", f"{SHARE}/scripts/lib.sh", 0o644),
)
FOLDERS: Final = (
    # (in the repository, which files, in the package)
    ("scripts", "*.constraints", f"{SHARE}/scripts"),
    ("docs", "*.md", DOC),
    ("docs/examples", "*", f"{DOC}/examples"),
)


class Release(NamedTuple):
    """What the package's changelog says of its newest version."""

    version: str
    epoch: int


def release() -> Release:
    """Read the newest entry of the package's changelog. Raises ValueError when it is not of the code's release."""
    text = (DEB / "changelog").read_text(encoding="utf-8")
    version = re.match(r"vllm-supervisor \((\S+)\)", text)
    date = re.search(r"^ -- .+>  (.+)$", text, re.MULTILINE)
    if version is None or date is None:
        raise ValueError("cannot read packaging/deb/changelog: dch writes its form")
    if version[1].rpartition("-")[0] != __version__:
        raise ValueError(
            f"cannot build {version[1]}: the code is {__version__}; add an entry to packaging/deb/changelog"
        )
    return Release(version[1], int(email.utils.parsedate_to_datetime(date[1]).timestamp()))


def put(root: Path, name: str, content: bytes, mode: int = 0o644) -> None:
    """Write one file of the package. Raises FileExistsError when two sources have a file of that name."""
    place = root / name
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("xb") as file:
        file.write(content)
    place.chmod(mode)


def fill(root: Path, architecture: str) -> None:
    """Lay out everything but DEBIAN/."""
    for source, name, mode in FILES:
        put(root, name, (ROOT / source).read_bytes(), mode)
    for folder, pattern, name in FOLDERS:
        for path in (ROOT / folder).glob(pattern):
            put(root, f"{name}/{path.name}", path.read_bytes())
    for path in (ROOT / "supervisord").rglob("*"):
        if path.suffix in PACKAGE_FILES:
            put(root, f"{LIB}/{path.relative_to(ROOT)}", path.read_bytes())
    (root / "etc/vllm-supervisor/conf.d").mkdir()
    put(root, f"{DOC}/changelog.gz", packed((ROOT / "CHANGELOG.md").read_bytes()))
    put(root, f"{DOC}/changelog.Debian.gz", packed((DEB / "changelog").read_bytes()))
    put(root, "usr/share/man/man8/vllm-supervisor.8.gz", packed(cli_texts.man().encode()))
    put(root, "usr/share/man/man5/vllm-supervisor.toml.5.gz", packed(config_texts.man().encode()))
    put(root, "usr/share/bash-completion/completions/vllm-supervisor", cli_texts.bash().encode())
    put(root, "usr/share/zsh/vendor-completions/_vllm-supervisor", cli_texts.zsh().encode())
    machine = deb_libraries.MACHINES[architecture]
    lock = (ROOT / "requirements/runtime.lock").read_text(encoding="utf-8")
    libraries = deb_libraries.locked(lock, machine)
    for name, content in deb_libraries.unpacked(deb_libraries.archives(libraries, machine, cache())):
        put(root, f"{LIB}/{name}", content)


def cache() -> Path:
    """Where scripts/lib.sh keeps what is fetched."""
    own, home = os.environ.get("VLLM_SUPERVISOR_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else Path(home or Path.home() / ".cache") / "vllm-supervisor"


def packed(content: bytes) -> bytes:
    """Compress without a name or a time."""
    return gzip.compress(content, 9, mtime=0)


def control(root: Path, version: str, architecture: str) -> None:
    """Write DEBIAN/: control, checksums, conffiles, maintainer scripts."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    # Of the files as they are, not of the blocks that they take on this disk.
    size_kib = sum(-(-path.stat().st_size // 1024) for path in files) + sum(
        1 for path in root.rglob("*") if path.is_dir()
    )
    text = (DEB / "control").read_text(encoding="utf-8")
    for name, value in (("VERSION", version), ("ARCHITECTURE", architecture), ("INSTALLED_SIZE", str(size_kib))):
        text = text.replace(f"@{name}@", value)
    sums = [f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.relative_to(root)}\n" for path in files]  # noqa: S324
    put(root, "DEBIAN/control", text.encode())
    put(root, "DEBIAN/md5sums", "".join(sums).encode())
    put(root, "DEBIAN/conffiles", (DEB / "conffiles").read_bytes())
    for script in MAINTAINER:
        put(root, f"DEBIAN/{script}", (DEB / script).read_bytes(), 0o755)


def settle(root: Path, epoch: int) -> None:
    """Give every file and folder one time, and every folder one mode."""
    for path in [root, *root.rglob("*")]:
        if path.is_dir():
            path.chmod(0o755)
        os.utime(path, (epoch, epoch))


def build(out: Path, version: str | None, architecture: str) -> Path:
    """Build the package into a folder and return its path."""
    newest = release()
    version = version or newest.version
    epoch = int(os.environ.setdefault("SOURCE_DATE_EPOCH", str(newest.epoch)))
    out.mkdir(parents=True, exist_ok=True)
    result = out / f"vllm-supervisor_{version}_{architecture}.deb"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        fill(root, architecture)
        control(root, version, architecture)
        settle(root, epoch)
        # One thread: how xz divides its work among several would show in the bytes.
        environment = os.environ | {"DPKG_DEB_THREADS_MAX": "1"}
        command = ("dpkg-deb", "--root-owner-group", "-Zxz", "-z9", "--build", root, result)
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    return result


def main() -> None:
    """Read the command line, build, and print where the package is."""
    parser = argparse.ArgumentParser(prog="scripts/build-deb", description="Builds the Debian package.")
    parser.add_argument("--out", metavar="DIR", type=Path, default=ROOT / "dist", help="where to (default: dist)")
    parser.add_argument("--version", help="a version other than that of packaging/deb/changelog")
    parser.add_argument("--architecture", choices=deb_libraries.MACHINES, default="amd64", help="default: amd64")
    options = parser.parse_args()
    if shutil.which("dpkg-deb") is None:
        sys.exit("build-deb: cannot find dpkg-deb: install the package dpkg")
    try:
        print(build(options.out, options.version, options.architecture))
    except (ValueError, OSError) as error:
        sys.exit(f"build-deb: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"build-deb: cannot go on: {error.cmd[0]} failed (its own words are above)")


if __name__ == "__main__":
    main()
