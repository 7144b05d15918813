"""The daemon's end of the GPU probes: starts, asks and kills them, and waits for none.

Each probe has one thread, which starts it, reads what it says and buries it. Whatever a driver does to a probe, nothing
else waits for it: requests go into a pipe that is never waited for, and a probe that hangs in the kernel even after
SIGKILL keeps only its own thread, which does not keep the daemon from ending.

The probe is a child of the daemon that leads a session of its own; the launcher, which buries dead orphans of engines,
leaves such a child alone for a minute, and this thread waits for it at once.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from supervisord.core.gpu_samples import GpuPlace
from supervisord.core.messages import GpuHelperEnded, GpuObservation
from supervisord.gpu.protocol import LINE_BYTES, ProtocolError, Whose, decode, persistence_request, sweep_request
from supervisord.log import printable

CLOSE_S: Final = 1.0
"""All probes together get so long to be buried when the daemon ends."""

_PROBE: Final = Path(__file__).with_name("helper.py")
_PASSED_ON: Final = ("PATH", "LD_LIBRARY_PATH", "SIM_NVML")
"""All that a probe inherits. SIM_NVML: the state of the library that tests put in the place of the driver's."""
_READ_BYTES: Final = 1 << 16
_LAST_BYTES: Final = 1024
_LAST_CHARS: Final = 200
_RELEASED: Final = -1


class GpuProbe:
    """All probes, by number. Its methods return at once."""

    def __init__(self, on_observation: Callable[[GpuObservation], None], whose: Whose) -> None:
        """`on_observation` and `whose` (engine and generation of a pid) are called in the threads of the probes."""
        self._on_observation = on_observation
        self._whose = whose
        self._helpers: dict[int, _Helper] = {}

    def start(self, helper: int) -> None:
        """Start the probe with this number. Its last observation, if it ends or cannot start, is GpuHelperEnded."""
        self._helpers = {number: known for number, known in self._helpers.items() if known.is_alive()}
        try:
            started = _Helper(helper, self._on_observation, self._whose)
            started.begin()
        except (OSError, RuntimeError) as error:  # no more descriptors, no more threads
            self._on_observation(GpuHelperEnded(helper, cannot_start(error)))
        else:
            self._helpers[helper] = started

    def sweep(self, helper: int, number: int, *, slow: bool, avoid: Iterable[GpuPlace] = ()) -> None:
        """Answered by GpusSwept, or by nothing."""
        self._ask(helper, sweep_request(number, slow=slow, avoid=avoid))

    def set_persistence(self, helper: int, uuid: str, *, on: bool) -> None:
        """Answered by PersistenceSet, or by nothing."""
        self._ask(helper, persistence_request(uuid, on=on))

    def kill(self, helper: int) -> None:
        """SIGKILL. Answered by GpuHelperEnded when it is gone."""
        if helper in self._helpers:
            self._helpers[helper].kill()

    def close(self) -> None:
        """Kill all. One that hangs in the kernel is left behind, and goes when the driver lets it go."""
        until = time.monotonic() + CLOSE_S
        for helper in self._helpers.values():
            helper.kill()
        for helper in self._helpers.values():
            helper.join(max(0.0, until - time.monotonic()))

    def _ask(self, helper: int, request: bytes) -> None:
        if helper in self._helpers:
            self._helpers[helper].ask(request)


class _Helper(threading.Thread):
    """One probe: the process, and the thread that has nothing else to do."""

    def __init__(self, number: int, on_observation: Callable[[GpuObservation], None], whose: Whose) -> None:
        """Raises OSError when there are no descriptors."""
        super().__init__(name=f"gpu-probe-{number}", daemon=True)
        self._number = number
        self._on_observation = on_observation
        self._whose = whose
        self._line = b""
        self._last_words = b""
        self._broken: str | None = None
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False
        # Requests may be written before the process is there to read them.
        self._stdin, self._requests = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._requests, False)

    def begin(self) -> None:
        """Start the thread. Raises RuntimeError when there can be no more of them."""
        try:
            self.start()
        except RuntimeError:
            os.close(self._stdin)
            self._release()
            raise

    def ask(self, request: bytes) -> None:
        """Write it whole (it is shorter than PIPE_BUF) or, to a probe that does not read, not at all."""
        with self._lock, contextlib.suppress(BlockingIOError, BrokenPipeError):
            if self._requests != _RELEASED:
                os.write(self._requests, request)

    def kill(self) -> None:
        """SIGKILL, now or as soon as it is started."""
        with self._lock:
            self._killed = True
            if self._process is not None:
                self._process.kill()

    def run(self) -> None:
        """Start it, read it, bury it, say how it ended."""
        try:
            process = self._start()
        except OSError as error:
            detail = cannot_start(error)
        else:
            with process:  # which waits for its end
                self._read(process)
            detail = self._how(process.returncode)
        self._release()
        self._on_observation(GpuHelperEnded(self._number, detail))

    def _start(self) -> subprocess.Popen[bytes]:
        """Raises OSError."""
        try:
            process = popen(self._stdin)
        finally:
            os.close(self._stdin)
        with self._lock:
            self._process = process
            if self._killed:
                process.kill()
        return process

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        """Pass on what it says until its pidfd tells that it is dead: what it started may hold its pipes for longer."""
        try:
            death = os.pidfd_open(process.pid)
        except OSError as error:
            self._give_up(f"it cannot be watched: {error.strerror}")
            return
        pipes = {
            pipe.fileno(): take
            for pipe, take in ((process.stdout, self._heard), (process.stderr, self._complained))
            if pipe is not None
        }
        poll = select.poll()
        for fd in (death, *pipes):
            os.set_blocking(fd, False)
            poll.register(fd, select.POLLIN)
        dead = False
        while not dead:
            ready = {fd for fd, _ in poll.poll()}
            dead = death in ready
            for pipe in ready.intersection(pipes) if not dead else tuple(pipes):
                if not _drain(pipe, pipes[pipe]):
                    poll.unregister(pipe)
                    del pipes[pipe]
        os.close(death)

    def _heard(self, data: bytes) -> None:
        if self._broken is not None:
            return
        *lines, self._line = (self._line + data).split(b"\n")
        if max(map(len, (*lines, self._line))) > LINE_BYTES:
            self._give_up(f"it wrote a line of more than {LINE_BYTES} bytes")
            return
        for line in lines:
            try:
                observation = decode(line, self._number, time.monotonic(), self._whose)
            except ProtocolError as error:
                self._give_up(f"what it said cannot be understood: {error}")
                return
            self._on_observation(observation)

    def _complained(self, data: bytes) -> None:
        self._last_words = (self._last_words + data)[-_LAST_BYTES:]

    def _give_up(self, why: str) -> None:
        self._broken = why
        self.kill()

    def _how(self, code: int) -> str:
        if self._broken is not None:
            return f"killed: {self._broken}"
        if self._killed:
            return "killed"
        lines = self._last_words.decode(errors="replace").split("\n")
        last = printable(next((line for line in reversed(lines) if line.strip()), "")[:_LAST_CHARS])
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"{how}{last and ': '}{last}"

    def _release(self) -> None:
        with self._lock:
            os.close(self._requests)
            self._requests = _RELEASED


def popen(stdin: int) -> subprocess.Popen[bytes]:
    """Start a probe that reads its requests from `stdin`. Raises OSError."""
    library = importlib.util.find_spec("pynvml")
    if library is None or library.origin is None:
        raise OSError(errno.ENOENT, "nvidia-ml-py is missing; install it beside vllm-supervisor")
    return subprocess.Popen(
        (sys.executable, "-IS", str(_PROBE), str(Path(library.origin).resolve().parent)),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        cwd="/",
        env={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
        start_new_session=True,
    )


def _drain(pipe: int, take: Callable[[bytes], None]) -> bool:
    """Take what is there; False at its end."""
    while True:
        try:
            data = os.read(pipe, _READ_BYTES)
        except BlockingIOError:
            return True
        if not data:
            return False
        take(data)


def cannot_start(error: OSError | RuntimeError) -> str:
    """Why there is no probe, in words."""
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"cannot start {sys.executable}: {why}"
