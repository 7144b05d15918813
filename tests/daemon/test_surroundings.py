"""Where the daemon is started from, and what happens to it over time: odd parents, blind readers, long use."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from pathlib import Path

from tests.daemon.harness import Daemon
from tests.daemon.outside import pids
from tests.daemon.sims import Sim, section
from tests.sim.engine import wait_until

ALWAYS_AT_ONCE = {"backoff_reset_after_s": 0, "max_restarts": 10_000}
F_SETPIPE_SZ = 1031


def odd_parent() -> None:
    """Runs between fork and exec: what a careless parent leaves behind."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGINT})


def test_signals_that_a_parent_ignored_or_blocked(tmp_path: Path) -> None:
    sim = Sim(tmp_path)
    with Daemon(section(sim)) as daemon:
        daemon.start_as(preexec_fn=odd_parent)
        pid = daemon.wait_state("a", "ready")["pid"]
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            assert not line.startswith("SigBlk") or int(line.split()[1], 16) == 0
        os.kill(pid, signal.SIGSEGV)
        assert daemon.wait_state("a", "ready", generation=2)["last_exit"]["signal"] == signal.SIGSEGV
        assert daemon.stop(20) == 0


def test_a_log_that_nobody_reads(tmp_path: Path) -> None:
    sim = Sim(tmp_path, restart=ALWAYS_AT_ONCE)
    with Daemon(section(sim)) as daemon:
        reader, writer = os.pipe()
        fcntl.fcntl(writer, F_SETPIPE_SZ, 4096)
        daemon.start_as(stdout=writer, stderr=writer)
        os.close(writer)
        daemon.wait_state("a", "ready")
        for generation in range(2, 14):
            os.kill(daemon.engine("a")["pid"], signal.SIGKILL)
            daemon.wait_state("a", "ready", generation=generation)
        began = time.monotonic()
        assert daemon.cli("status").returncode == 0
        assert daemon.stop(30) == 0
        assert time.monotonic() - began < 15
        os.close(reader)


def test_a_log_whose_reader_has_gone(tmp_path: Path) -> None:
    sim = Sim(tmp_path)
    with Daemon(section(sim)) as daemon:
        reader, writer = os.pipe()
        os.close(reader)
        daemon.start_as(stdout=writer, stderr=writer)
        os.close(writer)
        daemon.wait_state("a", "ready")
        assert daemon.stop(30) == 0


def test_long_use_leaves_nothing_behind(tmp_path: Path) -> None:
    warm = {"enabled": True, "prefill_tokens": 16, "decode_tokens": 2}
    sims = [Sim(tmp_path, "a", restart=ALWAYS_AT_ONCE, warmup=warm), Sim(tmp_path, "b", mood={"escape": True})]
    with Daemon(section(*sims)) as daemon:
        daemon.start()
        for sim in sims:
            daemon.wait_state(sim.name, "ready")
        daemon.request("restart", "a", "--now", "--wait")
        descriptors, threads = count_of(daemon, "fd"), count_of(daemon, "task")
        for number in range(12):
            if number % 2:
                os.kill(daemon.engine("a")["pid"], signal.SIGKILL)
                daemon.wait_state("a", "ready", generation=3 + number)
            else:
                daemon.request("restart", "a", "--now", "--wait")
            daemon.request("reload")
        wait_until(lambda: not zombies_of(daemon.pid), 30, "its dead to be buried")
        # The history opens its files when it writes first, and a look at /proc a few for a moment.
        wait_until(lambda: count_of(daemon, "fd") <= descriptors + 6, 30, f"{descriptors} descriptors", every_s=0.05)
        wait_until(lambda: count_of(daemon, "task") <= threads + 4, 30, f"{threads} threads", every_s=0.05)
        names = [path.name for path in (daemon.state_dir / "tmp").iterdir()]
        assert sorted(names) == ["a.14", "b.1"], "temporary directories of the living only"


def count_of(daemon: Daemon, what: str) -> int:
    return len(list(Path(f"/proc/{daemon.pid}/{what}").iterdir()))


def zombies_of(parent: int) -> list[int]:
    found = []
    for pid in pids():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] == "Z" and int(fields[1]) == parent:
            found.append(pid)
    return found


def test_a_state_directory_that_cannot_be_used(tmp_path: Path) -> None:
    sim = Sim(tmp_path)
    with Daemon(section(sim)) as daemon:
        daemon.state_dir.mkdir()
        for name in ("identity", "logs"):
            place = daemon.state_dir / name
            place.write_text("in the way", encoding="utf-8")
            daemon.start(wait=False)
            assert daemon.process is not None
            assert daemon.process.wait(30) == 1
            said = daemon.log.read_text(encoding="utf-8").splitlines()[-1]
            assert "cannot " in said
            assert str(place) in said
            place.unlink()
        assert sim.starts() == []
        subprocess.run(["rm", "-rf", str(daemon.state_dir)], check=True)
        daemon.start()
        daemon.wait_state("a", "ready")
