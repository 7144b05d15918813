"""Boots a real systemd as PID 1 of its own namespaces, over an overlay of this machine's root or of another one.

Needs root that may mount, util-linux, overlayfs, cgroup2, systemd and dbus-daemon; `check` says which of them is
missing. No network is needed and none is given: inside there is loopback alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Final

from tests.sim.engine import wait_until

BOOT_S: Final = 60
END_S: Final = 30
TARGET: Final = "multi-user.target"
REPOSITORY: Final = Path(__file__).parents[2]
INSIDE: Final = Path("/opt/under-test")
"""Where the repository is inside: not below /tmp, which services have of their own."""

_MODULES: Final = {
    Path(path): Path("/opt/modules") / str(number) for number, path in enumerate(sys.path) if "site-packages" in path
}
"""Where the libraries of this test's Python are inside: its environment may lie below /tmp, or anywhere."""

_SYSTEMD: Final = Path("/lib/systemd/systemd")
_MASKED: Final = [
    "systemd-udevd.service",
    "systemd-udev-trigger.service",
    "systemd-udevd-control.socket",
    "systemd-udevd-kernel.socket",
    "systemd-timesyncd.service",
    "systemd-resolved.service",
    "systemd-networkd.service",
    "systemd-firstboot.service",
    "dev-hugepages.mount",
    "dev-mqueue.mount",
    "sys-kernel-debug.mount",
    "sys-kernel-tracing.mount",
    "tmp.mount",
    "keyboard-setup.service",
    "console-setup.service",
    "apparmor.service",
    "systemd-modules-load.service",
    "systemd-sysctl.service",
    "systemd-random-seed.service",
    "systemd-pstore.service",
    "systemd-binfmt.service",
    "proc-sys-fs-binfmt_misc.automount",
    "nftables.service",
    "systemd-remount-fs.service",
    "getty.target",
    "systemd-logind.service",
    "e2scrub_reap.service",
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
]
"""What has no business, or no hardware, in there."""

_INIT: Final = r"""
set -eu
R=$1 UP=$2 TARGET=$3 LOWER=$4; shift 4
mount -t overlay overlay -o "lowerdir=$LOWER,upperdir=$UP/upper,workdir=$UP/work" "$R"
while [ $# -gt 0 ]; do mkdir -p "$R$2"; mount --bind "$1" "$R$2"; shift 2; done
cd "$R"
mkdir -p proc sys dev run tmp old
mount -t proc proc proc -o nosuid,nodev,noexec
mount -t sysfs sysfs sys -o ro,nosuid,nodev,noexec
mount -t cgroup2 cgroup2 sys/fs/cgroup -o rw,nosuid,nodev,noexec,nsdelegate 2>/dev/null ||
  mount -t cgroup2 cgroup2 sys/fs/cgroup -o rw,nosuid,nodev,noexec
mount -t tmpfs tmpfs dev -o mode=755,nosuid
mount -t tmpfs tmpfs run -o mode=755,nosuid,nodev
mount -t tmpfs tmpfs tmp -o mode=1777,nosuid,nodev
mkdir dev/pts dev/shm
mount -t devpts devpts dev/pts -o newinstance,ptmxmode=0666,mode=620,gid=5
mount -t tmpfs tmpfs dev/shm -o mode=1777,nosuid,nodev
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
for i in 0:stdin 1:stdout 2:stderr; do ln -s /proc/self/fd/${i%%:*} dev/${i##*:}; done
for n in null zero full random urandom tty; do : >dev/$n; mount --bind /dev/$n dev/$n; done
mkdir -p run/systemd/system run/host
cat /proc/sys/kernel/random/uuid >run/.boot_id
mount --bind run/.boot_id proc/sys/kernel/random/boot_id
echo tests >run/host/container-manager
ip link set lo up
hostname under-test
pivot_root . old
exec </dev/null >/dev/null 2>&1
umount -l /old
exec env -i container=tests PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
  /lib/systemd/systemd --system --unit="$TARGET" --show-status=0 --log-target=journal-or-kmsg
"""
"""Run in the new namespaces; ends as PID 1. Pairs of paths after the lower layers are bound into the new root."""

_SPACES: Final = ("--mount", "--pid", "--cgroup", "--uts", "--ipc", "--net", "--fork", "--propagation", "private")

_TRIAL: Final = r"""
set -e
mount -t tmpfs tmpfs /mnt
mkdir /mnt/upper /mnt/work /mnt/root /mnt/cgroup
mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work /mnt/root
mount -t cgroup2 cgroup2 /mnt/cgroup
mount -t proc proc /mnt/root/proc
"""
"""What a boot does first, to see whether it may."""


def check() -> str | None:
    """Why no machine can be booted here, in one sentence; None when one can."""
    if os.geteuid() != 0:
        return "cannot boot systemd for these tests: only root can make namespaces with mounts; run them as root"
    if not _SYSTEMD.exists():
        return f"cannot boot systemd for these tests: there is no {_SYSTEMD}; install Debian's package systemd"
    for program, package in (("unshare", "util-linux"), ("nsenter", "util-linux"), ("dbus-daemon", "dbus")):
        if shutil.which(program) is None:
            return f"cannot boot systemd for these tests: there is no {program}; install Debian's package {package}"
    tried = subprocess.run(["unshare", *_SPACES, "sh", "-c", _TRIAL], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        why = " ".join(tried.stderr.split()) or f"exit status {tried.returncode}"
        return (
            f"cannot boot systemd for these tests: root may not do here all that it takes ({why}); use a machine or a \
container that lets it make namespaces and mount overlay and cgroup2"
        )
    return None


class Machine:
    """A machine with systemd. It is gone, with all that ran in it, when the context ends.

    `root` is what its disk holds before it writes anything; `after` the disk of another machine over that root, from
    which this one goes on; `shown` are folders of this machine that are seen in it at the same place.
    """

    def __init__(self, root: Path = Path("/"), *, after: Path | None = None, shown: Sequence[Path] = ()) -> None:
        self._root = root
        self._after = after
        self._shown = shown
        self.home = Path(tempfile.mkdtemp(prefix="vs-boot.", dir="/tmp"))
        self._cgroup = (_cgroup2() or self.home / "cgroup2") / self.home.name
        self._console = self.home / "console.log"
        self._unshare: subprocess.Popen[bytes] | None = None
        self.pid1 = 0

    @property
    def disk(self) -> Path:
        """What was written on its disk. Other machines may go on from there, once this one is shut down."""
        return self.home / "upper"

    def __enter__(self) -> Machine:  # noqa: PYI034 (typing.Self came with Python 3.11)
        try:
            self._make_disk()
            self.boot()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            print(self.journal())
        self.close()

    # --- its life -----------------------------------------------------------------------------------------------

    def boot(self) -> None:
        """Boot, and wait until all of it is up."""
        self._cgroup.mkdir(exist_ok=True)
        binds = [(REPOSITORY, INSIDE), *_MODULES.items(), *((path, path) for path in self._shown)]
        lower = ":".join(str(layer) for layer in (self._after, self._root) if layer is not None)
        flat = [str(part) for pair in binds for part in pair]
        arguments = [str(self.home / "root"), str(self.home), TARGET, lower, *flat]
        with self._console.open("ab") as console:
            # Into its cgroup first: the namespace's root is where its first process is.
            self._unshare = subprocess.Popen(
                [
                    *("sh", "-c", 'echo 0 >"$0/cgroup.procs"; exec setsid "$@"', str(self._cgroup)),
                    *("unshare", *_SPACES, "bash", "-c", _INIT, "init", *arguments),
                ],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
            )
        wait_until(self._is_up, BOOT_S, "systemd to be up")

    def _is_up(self) -> bool:
        assert self._unshare is not None
        assert self._unshare.poll() is None, f"PID 1 ended: {self._console.read_text()}"
        if not self.pid1:
            children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children").read_text().split()
            self.pid1 = int(children[0]) if children else 0
            return False
        return self.run("systemctl", "is-active", TARGET, check=False).stdout.strip() == "active"

    def reboot(self) -> None:
        """Reboot in good order; its files stay."""
        self.shut_down()
        self.boot()

    def shut_down(self) -> None:
        """Go down in good order; its files stay until the context ends."""
        assert self._unshare is not None
        self.run("systemctl", "--no-block", "start", "reboot.target")
        self._unshare.wait(END_S * 4)
        self.pid1 = 0

    def close(self) -> None:
        """End everything in it at once, and leave nothing."""
        if self._unshare is not None and self._unshare.poll() is None:
            if self.pid1:
                # PID 1 of the namespace: the kernel ends the rest with it.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid1, signal.SIGKILL)
            else:
                self._unshare.kill()
            self._unshare.wait(END_S)
        if self._cgroup.exists():
            with contextlib.suppress(OSError):
                (self._cgroup / "cgroup.kill").write_text("1")
            wait_until(self._remove_cgroup, END_S, f"{self._cgroup} to go")
        if os.path.ismount(self.home):
            subprocess.run(["umount", "-l", str(self.home)], check=True)
        self.home.rmdir()

    def _remove_cgroup(self) -> bool:
        try:
            for path in sorted(self._cgroup.rglob("*"), key=lambda path: -len(path.parts)):
                if path.is_dir():
                    path.rmdir()
            self._cgroup.rmdir()
        except OSError:
            return False
        return True

    def _make_disk(self) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "vs-boot", str(self.home)], check=True)
        upper = self.disk
        for path in (upper, self.home / "work", self.home / "root"):
            path.mkdir()
        if self._cgroup.parent == self.home / "cgroup2":
            self._cgroup.parent.mkdir()
            subprocess.run(["mount", "-t", "cgroup2", "cgroup2", str(self._cgroup.parent)], check=True)
        if self._after is not None:
            return
        # Hide what this machine has enabled: only what a test installs is started.
        for name in ("etc/systemd/system", "etc/init.d", *(f"etc/rc{level}.d" for level in "0123456S")):
            (upper / name).mkdir(parents=True, exist_ok=True)
            os.setxattr(upper / name, "trusted.overlay.opaque", b"y")
        self.write("/etc/machine-id", f"{uuid.uuid4().hex}\n")
        self.write("/etc/fstab", "")
        self.write("/etc/hostname", "under-test\n")
        journald = "[Journal]\nStorage=persistent\nForwardToSyslog=no\nReadKMsg=no\nAudit=no\n"
        self.write("/etc/systemd/journald.conf.d/tests.conf", journald)
        (upper / "var/log/journal").mkdir(parents=True)
        for unit in _MASKED:
            (upper / "etc/systemd/system" / unit).symlink_to("/dev/null")

    # --- working in it ------------------------------------------------------------------------------------------

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Put a file on its disk; also while it runs."""
        file = (Path(f"/proc/{self.pid1}/root") if self.pid1 else self.disk) / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        file.chmod(mode)

    def path(self, path: str) -> Path:
        """A file of its, as seen from here while it runs."""
        return Path(f"/proc/{self.pid1}/root") / path.lstrip("/")

    def run(
        self, *argv: str, check: bool = True, env: Mapping[str, str] | None = None, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in it to its end."""
        done = subprocess.run(
            self._enter(argv), capture_output=True, text=True, timeout=timeout_s, check=False, env=self._env(env)
        )
        assert not check or done.returncode == 0, f"{argv}: {done.returncode} {done.stdout} {done.stderr}"
        return done

    def popen(
        self, *argv: str, stdin: int = subprocess.DEVNULL, stdout: IO[bytes] | int = subprocess.DEVNULL
    ) -> subprocess.Popen[bytes]:
        """Start a command in it."""
        return subprocess.Popen(self._enter(argv), stdin=stdin, stdout=stdout, env=self._env(None))

    def python(self) -> tuple[list[str], dict[str, str]]:
        """How this test's Python is run in it, with the repository: command and environment."""
        places = ":".join(map(str, (INSIDE, *_MODULES.values())))
        return [str(Path(sys.executable).resolve())], {"PYTHONPATH": places, "PYTHONDONTWRITEBYTECODE": "1"}

    def journal(self, *argv: str) -> str:
        """What its journal says."""
        if not self.pid1:
            return self._console.read_text(errors="replace") if self._console.exists() else ""
        return self.run("journalctl", "--no-pager", "-o", "short-monotonic", *argv, check=False).stdout[-12000:]

    def show(self, unit: str, *names: str) -> dict[str, str]:
        """Properties of a unit."""
        wanted = [f"--property={name}" for name in names]
        lines = self.run("systemctl", "show", unit, *wanted).stdout.splitlines()
        return dict(line.partition("=")[::2] for line in lines)

    def members(self, unit_cgroup: str) -> list[int]:
        """Processes of a cgroup, numbered as in there."""
        try:
            return [int(pid) for pid in self.run("cat", f"/sys/fs/cgroup{unit_cgroup}/cgroup.procs").stdout.split()]
        except AssertionError:
            return []

    def _enter(self, argv: Sequence[str]) -> list[str]:
        spaces = ["-t", str(self.pid1), "-m", "-p", "-C", "-u", "-i", "-n", "-r", "-w"]
        join = 'echo 0 >"$0/init.scope/cgroup.procs" 2>/dev/null; exec "$@"'
        return ["sh", "-c", join, str(self._cgroup), "nsenter", *spaces, "--", *argv]

    def _env(self, extra: Mapping[str, str] | None) -> dict[str, str]:
        own = {"LANG": "C.UTF-8", "HOME": "/root", "TERM": "dumb", "SYSTEMD_PAGER": "", "SYSTEMD_COLORS": "0"}
        return {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **own, **(extra or {})}


def _cgroup2() -> Path | None:
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, mount, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(mount)
    return None
