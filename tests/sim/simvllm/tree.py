"""The processes below `vllm serve`: how they are forked, named, tracked and ended."""

# Importing pathlib would cost a third of the start-up time.
# ruff: noqa: PTH110, PTH119, PTH123, PTH208

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .machine import Leftovers


def set_title(title: str) -> None:
    """What ps shows, as setproctitle does it: comm, and the memory of the command line."""
    with contextlib.suppress(OSError):
        with open("/proc/self/comm", "w", encoding="ascii") as file:
            file.write(title)
        with open("/proc/self/stat", encoding="utf-8") as file:
            fields = file.read().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        memory = os.open("/proc/self/mem", os.O_RDWR)
        text = title.encode()[: end - start - 1]
        os.pwrite(memory, text.ljust(end - start, b"\0"), start)
        os.close(memory)


def set_comm(name: str) -> None:
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as file:
        file.write(name)


class Tree:
    """Forks processes of one engine; every one of them ends at `deadline` whatever happens."""

    def __init__(self, deadline: float, leftovers: Leftovers) -> None:
        self.deadline = deadline
        self.leftovers = leftovers
        self.api_pid = os.getpid()
        self._tracker = -1

    def track(self) -> None:
        """Start the resource tracker: it unlinks shared memory after the last process."""
        read_end, write_end = os.pipe()
        hello_read, hello_write = os.pipe()
        os.set_blocking(write_end, False)
        name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        title = f"{name} -B -c from multiprocessing.resource_tracker import main;main(32)"

        def main() -> None:
            set_comm(name)
            signal.setitimer(signal.ITIMER_REAL, max(0.01, self.deadline + 5 - time.monotonic()))
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            os.close(self._tracker)
            os.close(hello_write)
            _run_tracker(read_end, self.deadline, self.leftovers)

        self._tracker = write_end
        self.fork(title, main, [read_end, hello_write])
        os.close(read_end)
        os.close(hello_write)
        os.read(hello_read, 1)  # until it bears its title
        os.close(hello_read)
        self.register(self.api_pid)

    def register(self, pid: int) -> None:
        with contextlib.suppress(OSError):
            os.write(self._tracker, f"{pid}\n".encode())

    def fork(self, title: str, main: Callable[[], None], keep: list[int]) -> int:
        pid = os.fork()
        if pid:
            self.register(pid)
            return pid
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            close_all_but({0, 1, 2, self._tracker, *keep})
            limit_life(self.deadline)
            set_title(title)
            main()
        except BaseException as error:  # noqa: BLE001 (the child must never return)
            say(f"simulated vllm: {title}: {type(error).__name__}: {error}", "stderr")
            os._exit(1)
        os._exit(0)

    def escape(self) -> None:
        """A process outside the engine's session that nobody waits for."""

        def middle() -> None:
            os.setsid()
            self.fork("vllm-escaped", _sleep_for_ever, [])

        os.waitpid(self.fork("vllm-escaped", middle, []), 0)


def _sleep_for_ever() -> None:
    while True:
        signal.pause()


def limit_life(deadline: float) -> None:
    """SIGALRM with its default action: not even a wedged interpreter outlives it."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, max(0.01, deadline - time.monotonic()))


def close_all_but(keep: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _run_tracker(pipe: int, deadline: float, leftovers: Leftovers) -> None:
    """Wait until every process of the engine has gone; kill what outlives the limit."""
    pidfds: list[int] = []
    rest = b""
    while time.monotonic() < deadline + 1:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline + 1 - time.monotonic()))
        if not ready:
            break
        data = os.read(pipe, 4096)
        if not data:
            for path in leftovers.shm:
                if os.path.exists(path):
                    sys.stderr.write(
                        f"/usr/lib/{os.path.basename(sys.executable)}/multiprocessing/"
                        "resource_tracker.py:254: UserWarning: resource_tracker: There appear "
                        "to be 1 leaked shared_memory objects to clean up at shutdown\n"
                    )
                    sys.stderr.flush()
                    leftovers.clean()
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if int(line) != os.getpid():
                with contextlib.suppress(OSError):
                    pidfds.append(os.pidfd_open(int(line)))
    for pidfd in pidfds:  # stopped processes never see their SIGALRM
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def say(line: str, stream: str = "stdout") -> None:
    """One line of log: blocks when nobody reads the pipe, goes on when nobody can."""
    with contextlib.suppress(OSError):
        os.write(1 if stream == "stdout" else 2, (line + "\n").encode("utf-8", "surrogateescape"))


def stamp() -> str:
    return time.strftime("%m-%d %H:%M:%S")


def max_life_s() -> float:
    return float(os.environ.get("VLLM_SIM_MAX_LIFE_S") or 900)
