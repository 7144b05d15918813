"""Memory and files of the simulated engine."""

# Importing pathlib would cost a third of the start-up time.
# ruff: noqa: PTH103, PTH105, PTH108, PTH118, PTH120, PTH123

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import sys
import time

from .tree import close_all_but, max_life_s

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .gpus import Claim

MIB = 1024 * 1024


class Leftovers:
    """Files that the engine makes in /dev/shm, in TMPDIR and for the simulated GPU library."""

    def __init__(self, mood: dict[str, Any]) -> None:
        self.shm: list[str] = []
        self._maps: list[mmap.mmap] = []
        if mood["shm"]:
            folder = os.environ.get("VLLM_SIM_SHM_DIR", "/dev/shm")
            for name, size in (("psm_" + os.urandom(4).hex(), 4096), ("sem.mp-" + _word(), 32)):
                self._share(os.path.join(folder, name), size)
        tmp = os.environ.get("TMPDIR")
        if mood["tmp_files"] and tmp:
            self._fill(tmp)

    def _share(self, path: str, size: int) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self.shm.append(path)
        os.ftruncate(fd, size)
        self._maps.append(mmap.mmap(fd, size))
        self._maps[-1][0] = 1
        os.close(fd)

    def _fill(self, tmp: str) -> None:
        text = os.urandom(16).hex()
        name = "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
        path = os.path.join(tmp, name)
        if len(path) > 107:
            raise OSError(f'ipc path "{path}" is longer than 107 characters (sizeof(sockaddr_un.sun_path)).')
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as sock:
            sock.bind(path)
        with open(os.path.join(tmp, "vllm_dist_" + os.urandom(16).hex()), "wb"):
            pass

    def clean(self) -> None:
        """What a clean exit removes; the files in TMPDIR stay behind, as in vLLM."""
        for path in self.shm:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _word() -> str:
    letters = "abcdefghijklmnopqrstuvwxyz0123456789_"
    return "".join(letters[byte % len(letters)] for byte in os.urandom(8))


class Memory:
    """Host memory that grows, and the value a simulated GPU library reads."""

    def __init__(self, gpus: list[str], claim: Claim | None = None) -> None:
        self.claim = claim
        self.mood: dict[str, Any] = {}
        self._held: list[bytes] = []
        self._owed = 0.0
        self._leaked_gpu = 0.0
        self._largest_batch = 0.0
        self._at = time.monotonic()
        root = os.environ.get("VLLM_SIM_GPU_DIR")
        self._files = [f"{root}/gpu{gpu}/procs/{os.getpid()}" for gpu in gpus] if root and not claim else []
        if claim:
            self._files = [claim.path]
            claim.on_change = self.tell_gpu
        self._said = -1.0
        self._kept = False

    def allocate(self, mib: float) -> None:
        if mib > 0:
            self._held.append(b"\1" * int(mib * MIB))

    def grows(self) -> bool:
        return bool(self.mood["leak_mib_per_s"] or self.mood["gpu_leak_mib_per_s"])

    def tick(self) -> None:
        now = time.monotonic()
        passed, self._at = now - self._at, now
        self._owed += passed * self.mood["leak_mib_per_s"]
        if self._owed >= 1:
            self.allocate(int(self._owed))
            self._owed -= int(self._owed)
        self._leaked_gpu += passed * self.mood["gpu_leak_mib_per_s"]
        self.tell_gpu()

    @property
    def grown_gpu_mib(self) -> float:
        """What came after the start: workspaces, up to the largest batch so far, and what leaks."""
        return float(self._leaked_gpu + self.mood["gpu_workspace_mib"] * self._largest_batch)

    def grow_gpu(self, mib: float) -> None:
        """A worker grows by what its engine core says."""
        self._leaked_gpu = mib
        self.tell_gpu()

    def on_batch(self, filled: float) -> None:
        """A step of the model over a batch, as a part of --max-num-batched-tokens."""
        self._largest_batch = max(self._largest_batch, filled)
        self.tell_gpu()

    def tell_gpu(self) -> None:
        base_mib = self.claim.held_bytes / MIB if self.claim else self.mood["gpu_mib"]
        mib = base_mib + self.grown_gpu_mib
        if mib == self._said:
            return
        self._said = mib
        for path in self._files:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path + ".new", "w", encoding="ascii") as file:
                file.write(f"{int(mib * MIB)}\n")
            os.replace(path + ".new", path)

    def release_gpu(self) -> None:
        for path in [] if self._kept else self._files:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def keep_gpu(self, delay_s: float) -> None:
        """Let the memory outlive this process by `delay_s`, also after SIGKILL: a keeper waits."""
        if not self._files or not delay_s or self.claim:
            return
        self._kept = True
        lingers = [path.replace("/procs/", "/linger/") for path in self._files]
        for path in lingers:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="ascii") as file:
                file.write(f"{delay_s}\n")
        pidfd = os.pidfd_open(os.getpid())
        os.set_inheritable(pidfd, True)
        executed, executing = os.pipe()
        if (child := os.fork()) == 0:
            os.setsid()
            if os.fork() == 0:
                _run_keeper(pidfd, executing, delay_s, [*self._files, *lingers])
            os._exit(0)
        os.waitpid(child, 0)
        os.close(executing)
        os.read(executed, 1)  # ends when the keeper has become another program
        os.close(executed)
        os.close(pidfd)


_KEEPER = """
import os, select, signal, sys, time
fd, delay, life = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
signal.setitimer(signal.ITIMER_REAL, life)
select.select([fd], [], [])
time.sleep(delay)
for path in sys.argv[4:]:
    if os.path.exists(path):
        os.unlink(path)
"""


def _run_keeper(pidfd: int, executing: int, delay_s: float, paths: list[str]) -> None:
    """A fresh interpreter with an empty environment, so that nobody takes it for an engine."""
    close_all_but({0, 1, 2, pidfd, executing})
    nothing = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    signal.setitimer(signal.ITIMER_REAL, 0)
    args = [sys.executable, "-IS", "-c", _KEEPER, str(pidfd), str(delay_s), str(max_life_s())]
    os.execve(sys.executable, [*args, *paths], {})
