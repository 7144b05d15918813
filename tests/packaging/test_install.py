"""dpkg installs, upgrades, removes and purges the package in a root made of this machine's own by an overlay.

No systemd runs in there: it is what an image builder or an installer sees. tests/e2e_systemd boots one.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.conftest import build

NEEDED = ("python3", "systemd", "dbus", "tzdata", "init-system-helpers", "passwd")


def problem() -> str | None:
    """Why no package can be installed in an overlay here."""
    for command, wanted in (
        (("dpkg-query", "-W", *NEEDED), f"the packages {', '.join(NEEDED)}: scripts/test --systemd installs them"),
        (("unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"), "root that may mount"),
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return f"cannot install the package here without {wanted} ({' '.join(done.stderr.split())})"
    return None


INSIDE = """set -e
mount -t tmpfs tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
cd "$1/root"
mount --bind /dev dev
mount -t proc proc proc
mount -t tmpfs tmpfs run
mount -t tmpfs tmpfs tmp
mount --bind "$2" mnt
# As on a fresh machine, whatever this one has.
fresh='dpkg -P vllm-supervisor; userdel vllm; groupdel vllm-admin; rm -rf /var/lib/vllm'
chroot . sh -c "$fresh" >/dev/null 2>&1 || true
set +e
chroot . sh -c "$3"
echo "exit $?"
cd "$1/upper"
find . ! -type d ! -type c | sort >"$1/root/mnt/left"
find . -type d | sort >>"$1/root/mnt/left"
"""
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
OURS = ("vllm", "supervisor")


class Machine:
    """A fresh root for one script; `files` is /mnt inside."""

    def __init__(self, folder: Path) -> None:
        self._mount = folder / "mount"
        self.files = folder / "files"
        self._mount.mkdir()
        self.files.mkdir()

    def run(self, script: str) -> tuple[str, str]:
        """Run a script and return what it printed, its exit status last; and what it left, less dpkg's own."""
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", INSIDE, "sh"]
        environment = {"PATH": PATH, "HOME": "/root", "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
        done = subprocess.run(
            [*command, self._mount, self.files, script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            env=environment,
        )
        return done.stdout, (self.files / "left").read_text()


@pytest.fixture
def machine(tmp_path: Path, package: Path) -> Iterator[Machine]:
    wrong = problem()
    assert wrong is None, wrong
    made = Machine(tmp_path)
    shutil.copy(package, made.files / "package.deb")
    yield made
    shutil.rmtree(made.files)


def test_install_use_remove_purge(machine: Machine) -> None:
    out, left = machine.run("""set -e
      exec 2>&1
      dpkg -i /mnt/package.deb
      vllm-supervisor --version
      vllm-supervisor check-config
      vllm-supervisor status || echo "status $?"
      env -u HOME /usr/share/vllm-supervisor/scripts/install-vllm --help | head -n 1
      id -Gn vllm | tr ' ' '\\n' | sort | tr '\\n' ' '; getent passwd vllm | cut -d: -f6,7
      getent group vllm-admin | cut -d: -f1
      stat -c '%n %a %U %G' /etc/vllm-supervisor/config.toml /var/lib/vllm /var/lib/vllm-supervisor
      readlink /etc/systemd/system/multi-user.target.wants/vllm-supervisor.service
      find /usr/lib/vllm-supervisor -name '*.pyc' | grep -q app.cpython && echo compiled
      dpkg -V vllm-supervisor && echo verified
      man -w vllm-supervisor vllm-supervisor.toml
      echo '# mine' >>/etc/vllm-supervisor/config.toml
      echo >/etc/vllm-supervisor/conf.d/mine.toml
      mkdir /var/lib/vllm/models
      dpkg -r vllm-supervisor
      ls -d /usr/lib/vllm-supervisor /usr/bin/vllm-supervisor 2>/dev/null || echo removed
      tail -n 1 /etc/vllm-supervisor/config.toml
      dpkg -P vllm-supervisor
      getent passwd vllm || getent group vllm vllm-admin || echo no account
    """)
    assert out.endswith("exit 0\n"), out
    for line in (
        "vllm-supervisor 0.1.0",
        "/etc/vllm-supervisor/config.toml is valid; engines: none",
        "status 3",
        "usage: scripts/install-vllm [options]",
        "render video vllm /var/lib/vllm:/usr/sbin/nologin",
        "/etc/vllm-supervisor/config.toml 640 root vllm-admin",
        "/var/lib/vllm 750 vllm vllm",
        "/var/lib/vllm-supervisor 711 root root",
        "compiled",
        "verified",
        "/usr/share/man/man8/vllm-supervisor.8.gz",
        "/usr/share/man/man5/vllm-supervisor.toml.5.gz",
        "removed",
        "# mine",
        "no account",
    ):
        assert line in out.splitlines(), out
    assert "/systemd/system/vllm-supervisor.service\n" in out
    assert "WARNING" not in out.upper().replace("0 WARNINGS", ""), out
    ours = [path for path in left.splitlines() if any(word in path for word in OURS) and "/dpkg/" not in path]
    assert ours == []


def test_upgrade_keeps_what_the_operator_has(machine: Machine, tmp_path: Path) -> None:
    newer = build(tmp_path / "newer", "--version", "99.0-1")
    shutil.copy(newer, machine.files / "newer.deb")
    out, _ = machine.run("""set -e
      exec 2>&1
      dpkg -i /mnt/package.deb >/dev/null
      printf '[supervisor]\\npoll_interval_s = 7\\n' >/etc/vllm-supervisor/config.toml
      chmod 0600 /etc/vllm-supervisor/config.toml; chgrp root /etc/vllm-supervisor/config.toml
      systemctl disable vllm-supervisor.service
      dpkg -i /mnt/newer.deb /mnt/package.deb
      dpkg -i /mnt/newer.deb
      dpkg --configure vllm-supervisor 2>&1 || true
      dpkg-query -W -f '${Version} ${Status}\\n' vllm-supervisor
      stat -c '%a %U %G' /etc/vllm-supervisor/config.toml; tail -n 1 /etc/vllm-supervisor/config.toml
      test -e /etc/systemd/system/multi-user.target.wants/vllm-supervisor.service || echo disabled
      vllm-supervisor check-config
    """)
    assert out.endswith("exit 0\n"), out
    for line in ("99.0-1 install ok installed", "600 root root", "poll_interval_s = 7", "disabled"):
        assert line in out.splitlines(), out


def test_an_account_that_was_there_before_stays(machine: Machine) -> None:
    out, _ = machine.run("""set -e
      exec 2>&1
      useradd --system --create-home --home-dir /var/lib/vllm --no-user-group --gid nogroup vllm
      echo >/var/lib/vllm/model
      dpkg -i /mnt/package.deb
      dpkg -P vllm-supervisor
      getent passwd vllm >/dev/null && ls /var/lib/vllm/model
      getent group vllm-admin || echo no group
    """)
    assert out.endswith("/var/lib/vllm/model\nno group\nexit 0\n"), out


def test_a_version_that_cannot_start_is_noticed(machine: Machine, package: Path) -> None:
    tree = machine.files / "tree"
    subprocess.run(["dpkg-deb", "--raw-extract", package, tree], check=True)
    with (tree / "usr/lib/vllm-supervisor/supervisord/app.py").open("a") as file:
        file.write("\nraise RuntimeError('a broken release')\n")
    subprocess.run(["dpkg-deb", "--build", tree, machine.files / "broken.deb"], check=True, stdout=subprocess.DEVNULL)
    out, _ = machine.run("""exec 2>&1
      dpkg -i /mnt/broken.deb
      echo "dpkg $?"
      dpkg -i /mnt/package.deb && dpkg-query -W -f '${Status}\\n' vllm-supervisor
    """)
    assert "a broken release" in out
    assert "dpkg 1\n" in out
    assert out.endswith("install ok installed\nexit 0\n"), out
