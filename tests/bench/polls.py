"""Memory over many more looks than a soak has: a simulated engine that is polled 25 times as often."""

from __future__ import annotations

import time
import urllib.request

from tests.bench import real_proc
from tests.bench.report import Table
from tests.daemon.harness import Daemon, engine_toml
from tests.sim.engine import free_port, sim_command

_POLL_S = 0.2
_USUAL_POLL_S = 5
_ASK_S = 1.0
_POINTS = (0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)


def table(minutes: float) -> Table:
    """Anonymous memory, descriptors and threads at some points of that time."""
    listen = f"127.0.0.1:{free_port()}"
    engine = engine_toml("a", sim_command(), free_port(), "/")
    rows = []
    with Daemon(engine, poll_interval_s=_POLL_S, listen=listen) as daemon:
        daemon.start()
        daemon.wait_state("a", "ready", 120)
        began = time.monotonic()
        for part in _POINTS:
            while time.monotonic() < began + part * minutes * 60:
                daemon.status()
                with urllib.request.urlopen(f"http://{listen}/metrics", timeout=30) as page:
                    page.read()
                time.sleep(_ASK_S)
            passed_s = time.monotonic() - began
            used = real_proc.process(daemon.pid)
            usual_h = passed_s / _POLL_S * _USUAL_POLL_S / 3600
            seen = (f"{used['anonymous_kib']:,.0f} KiB", f"{used['descriptors']:.0f}", f"{used['threads']:.0f}")
            rows.append((f"{passed_s / 60:.1f} min", f"{passed_s / _POLL_S:,.0f}", f"{usual_h:.1f} h", *seen))
        assert daemon.engine("a")["generation"] == 1
    header = (
        "after",
        "looks at the engine",
        f"as many as every {_USUAL_POLL_S} s in",
        "anonymous",
        "descriptors",
        "threads",
    )
    notes = (f"A simulated engine, polled every {_POLL_S} s, which stays ready; `/metrics` and status each second.",)
    return Table("The same daemon over many more looks", header, tuple(rows), notes)
