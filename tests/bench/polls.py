"""Memory over many more looks than a soak has: a simulated engine that is polled 25 times as often."""

from __future__ import annotations

import time
import urllib.request
from pathlib import Path

from tests.bench import real_proc
from tests.bench.report import Table
from tests.daemon.harness import Daemon, engine_toml
from tests.sim.engine import free_port, sim_command

_POLL_S = 0.2
_USUAL_POLL_S = 5
_ASK_S = 1.0
_START_S = 120
# Without this the daemon has the engine log none of its looks.
_LOGGED = '[engine.a.args]\ndisable-access-log-for-endpoints = "/health"'
_POINTS = (0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)


def table(minutes: float) -> Table:
    """Anonymous memory, descriptors and threads at some points of that time."""
    listen = f"127.0.0.1:{free_port()}"
    engine = engine_toml("a", sim_command(), free_port(), "/", _LOGGED)
    rows = []
    env = {"VLLM_SIM_MAX_LIFE_S": f"{minutes * 60 + _START_S:.0f}"}
    with Daemon(engine, env, poll_interval_s=_POLL_S, listen=listen) as daemon:
        daemon.start()
        daemon.wait_state("a", "ready", _START_S)
        began = time.monotonic()
        for part in _POINTS:
            while time.monotonic() < began + part * minutes * 60:
                daemon.status()
                with urllib.request.urlopen(f"http://{listen}/metrics", timeout=30) as page:
                    page.read()
                time.sleep(_ASK_S)
            passed_s = time.monotonic() - began
            used = real_proc.process(daemon.pid)
            looks = _looks(daemon.state_dir / "logs" / "a.log")
            usual_h = looks * _USUAL_POLL_S / 3600
            seen = (f"{used['anonymous_kib']:,.0f} KiB", f"{used['descriptors']:.0f}", f"{used['threads']:.0f}")
            rows.append((f"{passed_s / 60:.1f} min", f"{looks:,}", f"{usual_h:.1f} h", *seen))
        assert daemon.engine("a")["generation"] == 1
    header = (
        "after",
        "looks at the engine",
        f"as many as every {_USUAL_POLL_S} s in",
        "anonymous",
        "descriptors",
        "threads",
    )
    notes = (
        f"A simulated engine, polled every {_POLL_S} s, which stays ready; `/metrics` and status each second.",
        (
            "Looks: those that the engine has answered since its start, by its access log. This shows growth by looks, "
            "not by time: what grows with the hours alone is not hurried."
        ),
    )
    return Table("The same daemon over many more looks", header, tuple(rows), notes)


def _looks(log: Path) -> int:
    """Since the engine's start; each asks for /metrics once."""
    with log.open(encoding="utf-8", errors="replace") as lines:
        return sum('"GET /metrics HTTP/1.1" 200' in line for line in lines)
