"""What is in the package, without installing it."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from supervisord import __version__
from supervisord.config import load
from tests.packaging.conftest import ROOT, build, try_build

LIB = "./usr/lib/vllm-supervisor"


def deb(*arguments: str | Path) -> str:
    return subprocess.run(["dpkg-deb", *arguments], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def contents(package: Path) -> dict[str, str]:
    """Mode and owner of each file and folder, by name."""
    lines = (line.split(None, 5) for line in deb("--contents", package).splitlines())
    return {name: f"{mode} {owner}" for mode, owner, _, _, _, name in lines}


@pytest.fixture(scope="module")
def tree(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tree")
    deb("--raw-extract", package, folder)
    return folder


def test_control(package: Path) -> None:
    fields = {name: deb("--field", package, name).strip() for name in ("Package", "Version", "Architecture", "Depends")}
    assert fields["Package"] == "vllm-supervisor"
    assert fields["Version"].rpartition("-")[0] == __version__
    assert fields["Architecture"] == "amd64"
    assert "python3 (>= 3.10)" in fields["Depends"]
    assert "systemd (>= 249)" in fields["Depends"]


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("./usr/bin/vllm-supervisor", "-rwxr-xr-x"),
        ("./usr/lib/systemd/system/vllm-supervisor.service", "-rw-r--r--"),
        ("./usr/lib/systemd/system/vllm.slice", "-rw-r--r--"),
        ("./usr/lib/sysusers.d/vllm-supervisor.conf", "-rw-r--r--"),
        ("./usr/lib/tmpfiles.d/vllm-supervisor.conf", "-rw-r--r--"),
        ("./etc/needrestart/conf.d/vllm-supervisor.conf", "-rw-r--r--"),
        ("./etc/vllm-supervisor/config.toml", "-rw-r-----"),
        ("./etc/vllm-supervisor/conf.d/", "drwxr-xr-x"),
        ("./usr/share/vllm-supervisor/scripts/install-vllm", "-rwxr-xr-x"),
        ("./usr/share/vllm-supervisor/scripts/lib.sh", "-rw-r--r--"),
        ("./usr/share/vllm-supervisor/prometheus/vllm-supervisor.rules.yml", "-rw-r--r--"),
        ("./usr/share/vllm-supervisor/grafana/vllm-supervisor.json", "-rw-r--r--"),
        ("./usr/share/doc/vllm-supervisor/examples/haproxy.cfg", "-rw-r--r--"),
        ("./usr/share/man/man8/vllm-supervisor.8.gz", "-rw-r--r--"),
        ("./usr/share/man/man5/vllm-supervisor.toml.5.gz", "-rw-r--r--"),
        ("./usr/share/bash-completion/completions/vllm-supervisor", "-rw-r--r--"),
        ("./usr/share/zsh/vendor-completions/_vllm-supervisor", "-rw-r--r--"),
        ("./usr/share/doc/vllm-supervisor/copyright", "-rw-r--r--"),
        ("./usr/share/doc/vllm-supervisor/configuration.md", "-rw-r--r--"),
        (f"{LIB}/supervisord/app.py", "-rw-r--r--"),
        (f"{LIB}/supervisord/engine/profiles.toml", "-rw-r--r--"),
        (f"{LIB}/supervisord/doctor.schema.json", "-rw-r--r--"),
        (f"{LIB}/supervisord/status.schema.json", "-rw-r--r--"),
        (f"{LIB}/psutil/_psutil_linux.abi3.so", "-rw-r--r--"),
    ],
)
def test_is_inside(contents: dict[str, str], name: str, mode: str) -> None:
    assert contents[name] == f"{mode} root/root"


def test_nothing_else_is_inside(contents: dict[str, str]) -> None:
    assert {f"{value.split()[1]}" for value in contents.values()} == {"root/root"}
    assert [name for name in contents if "__pycache__" in name or name.endswith((".pyc", ".orig", "~"))] == []
    compiled = [name for name in contents if name.endswith(".so")]
    assert compiled == [f"{LIB}/psutil/_psutil_linux.abi3.so"], "anything else is bound to one version of Python"
    # Of ours: what git knows, no more and no less.
    known = subprocess.run(["git", "ls-files", "supervisord"], cwd=ROOT, capture_output=True, text=True, check=False)
    if known.returncode == 0 and known.stdout:
        ours = {name.removeprefix(f"{LIB}/") for name in contents if name.startswith(f"{LIB}/supervisord/")}
        assert {name for name in ours if not name.endswith("/")} == set(known.stdout.split())


def test_etc_is_all_conffiles(contents: dict[str, str], tree: Path) -> None:
    files = {name.removeprefix(".") for name in contents if name.startswith("./etc/") and not name.endswith("/")}
    assert set((tree / "DEBIAN/conffiles").read_text().split()) == files


def test_checksums_are_complete(contents: dict[str, str], tree: Path) -> None:
    sums = dict(line.split("  ", 1)[::-1] for line in (tree / "DEBIAN/md5sums").read_text().splitlines())
    assert {f"./{name}" for name in sums} == {name for name in contents if not name.endswith("/")}
    assert all(hashlib.md5((tree / name).read_bytes()).hexdigest() == digest for name, digest in sums.items())


def test_every_library_of_the_lock_is_inside_and_in_the_copyright(tree: Path) -> None:
    lock = (ROOT / "requirements/runtime.lock").read_text()
    # tzdata is for Windows; all others some Python from 3.10 on needs.
    locked = {
        name: version for name, version in re.findall(r"^([\w.-]+)==(\S+)", lock, re.MULTILINE) if name != "tzdata"
    }
    found = {}
    for folder in (tree / LIB).glob("*.dist-info"):
        name, _, version = folder.name.removesuffix(".dist-info").rpartition("-")
        found[name.replace("_", "-")] = version
        assert (folder / "METADATA").is_file()
    assert found == locked
    stanzas = (tree / "usr/share/doc/vllm-supervisor/copyright").read_text()
    assert [name for name in locked if f"/{name.replace('-', '_')}*" not in stanzas] == []


def python_of(minor: str) -> str | None:
    """An interpreter of this minor version, wherever it is on this machine."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for place in (
        Path(f"/usr/bin/python{minor}"),
        *sorted(versions.glob(f"{minor}.*/bin/python")),
        Path(sys.executable),
    ):
        asked = [str(place), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        if place.exists() and subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip() == minor:
            return str(place)
    return None


PYTHONS = list(filter(None, map(python_of, ("3.10", "3.11", "3.12", "3.13", "3.14"))))
"""Those of this machine, this one at least; others are in the roots of tests/e2e_systemd/test_releases.py."""


@pytest.mark.parametrize("python", PYTHONS)
def test_the_command_runs_from_the_tree_alone(tree: Path, python: str) -> None:
    """Isolated, as the package's command runs: without site-packages, so nothing of this environment helps."""
    program = f"""import sys
sys.dont_write_bytecode = True
sys.path.insert(0, {str(tree / LIB)!r})
import psutil, pynvml, supervisord.app
from supervisord.cli import main
assert psutil.Process().name() and len(psutil.pids()) > 1
print(*(module.__file__ for module in (psutil, psutil._psplatform.cext, pynvml, supervisord.app)))
sys.exit(main(["check-config", sys.argv[1]]))"""
    config = tree / "etc/vllm-supervisor/config.toml"
    done = subprocess.run([python, "-IS", "-c", program, str(config)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    modules, verdict = done.stdout.splitlines()
    assert all(path.startswith(str(tree)) for path in modules.split())
    assert "is valid" in verdict


def test_the_configuration_is_valid_and_so_is_its_example(tree: Path, tmp_path: Path) -> None:
    shipped = tree / "etc/vllm-supervisor/config.toml"
    assert load(shipped, trust=False).spec.engines == {}
    example = tmp_path / "config.toml"
    example.write_text(re.sub(r"^#(?=\[|\w)", "", shipped.read_text(), flags=re.MULTILINE))
    loaded = load(example, trust=False, check_files=False)
    assert list(loaded.spec.engines) == ["qwen"]
    assert loaded.warnings == ()


def test_maintainer_scripts(tree: Path) -> None:
    for name in ("postinst", "prerm", "postrm"):
        script = tree / "DEBIAN" / name
        assert script.read_text().startswith("#!/bin/sh\nset -e\n")
        subprocess.run(["sh", "-n", script], check=True)
        # Nobody calls them with such a word: they must not take it for one that they know.
        assert subprocess.run(["sh", script, "nonsense"], capture_output=True, check=False).returncode == 1


def test_the_same_bytes_again(package: Path, tmp_path: Path) -> None:
    again = build(tmp_path / "again", umask=0o077)
    assert again.name == package.name
    assert again.read_bytes() == package.read_bytes()


def test_an_archive_that_the_lock_does_not_know_is_refused(package: Path, tmp_path: Path) -> None:
    assert package.exists()  # so the archives have been fetched
    own, home = os.environ.get("VLLM_SUPERVISOR_CACHE"), os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")
    shutil.copytree(Path(own or Path(home) / "vllm-supervisor") / "archives", tmp_path / "cache/archives")
    for archive in (tmp_path / "cache/archives").glob("*/tomli-*.whl"):
        archive.write_bytes(archive.read_bytes() + b"\0")
    done = try_build(tmp_path / "out", VLLM_SUPERVISOR_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 1
    assert "the lock does not know its hash; remove that folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_for_another_machine(tmp_path: Path) -> None:
    other = build(tmp_path, "--architecture", "arm64", "--version", "9.9-1")
    assert other.name == "vllm-supervisor_9.9-1_arm64.deb"
    assert deb("--field", other, "Version", "Architecture") == "Version: 9.9-1\nArchitecture: arm64\n"
    deb("--raw-extract", other, tmp_path / "tree")
    library = (tmp_path / "tree" / LIB / "psutil/_psutil_linux.abi3.so").read_bytes()
    assert library[18:20] == b"\xb7\x00", "EM_AARCH64 in the ELF header"


def test_lintian(package: Path) -> None:
    command = ["lintian", "--allow-root", "--fail-on", "error,warning", "--no-cfg", str(package)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", 0)
