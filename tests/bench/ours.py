"""Us alone, over simulated engines: what the daemon costs, how quick it is, and the targets that were set for it."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from supervisord.launcher import procfs
from tests.bench import scale, split
from tests.bench.attempts import MISSING, Attempts
from tests.bench.report import Table, quantile, spread
from tests.bench.scale import Cost
from tests.bench.scraping import SCRAPE_S
from tests.bench.split import Relaunch, Status

UNSEEN_PERCENT: Final = 0.0005
RELAUNCH_MS: Final = 10
CPU_PERCENT: Final = 0.3
CPU_OF_100_PERCENT: Final = 5
RESIDENT_MIB: Final = 60
STATUS_MS: Final = 80
NOTICED_MS: Final = 100
THREADS: Final = "CPU by kind of thread, % of a core"
RELAUNCH: Final = "Crash to relaunch, and where it goes"
STATUS: Final = "`status`, and where it goes"
IMPORTS: Final = "Memory of what is imported"
_KILLS: Final = 10
_FOR_P99: Final = 100
"""With fewer values the 99th percentile would be the largest."""


@dataclass(frozen=True)
class Size:
    """How much is measured: engines with the seconds of their window and the numbers of adoptions and of kills."""

    scales: tuple[tuple[int, float, int, int], ...] = (
        (1, 20, 5, 0),
        (8, 60, 5, _KILLS),
        (32, 20, 0, 0),
        (100, 20, 3, 0),
    )
    kills: int = 30
    status_runs: int = 20
    starts: int = 20
    looks: int = 200


QUICK: Final = Size(scales=((1, 5, 1, 0), (8, 5, 1, _KILLS)), kills=3, status_runs=3, starts=2, looks=20)
_OF_TARGETS: Final = 8


def tables(options: argparse.Namespace) -> list[Table]:
    """All of them."""
    size = QUICK if options.quick else Size()
    attempts = Attempts()
    costs = {one[0]: attempts.of(f"{one[0]} engines", partial(scale.cost, *one)) for one in size.scales}
    status = {
        count: attempts.of(f"status of {count}", partial(split.status, count, size.status_runs))
        for count in (1, _OF_TARGETS, 100)
    }
    alone = attempts.of("relaunch of one process", lambda: split.relaunch(size.kills, tree=False))
    tree = attempts.of("relaunch of a tree", lambda: split.relaunch(size.kills, tree=True))
    bare = attempts.of("a bare start", lambda: split.bare_start_ms(size.kills))
    noticed = attempts.of("readiness", lambda: split.noticed_ms(size.starts))
    looks = attempts.of("looks", lambda: split.look_us(size.looks))
    grown = attempts.of("imports", split.memory_of_imports_mib)
    found = [one for one in costs.values() if one is not None]
    return [
        targets_table(costs, status, alone, noticed, attempts.notes),
        _scale(found),
        _threads(found),
        turns_table(found),
        _adoption(found),
        _polls(looks, found),
        _relaunch({"one process": alone, "a tree like vLLM's": tree}, bare),
        _status_split(status),
        *([_imports(grown)] if grown else []),
    ]


# ---- the targets ----------------------------------------------------------------------------------------------------


def _verdict(value: float, limit: float, where: str) -> str:
    """`where` is the table that shows what it would take, if one does."""
    see = f"; see *{where}*" if where else ""
    return "reached" if value <= limit else f"**missed**: {value / limit:.1f} times as much{see}"


def _times(what: str, times: Sequence[float] | None, limit_ms: float, where: str = "") -> tuple[str, ...]:
    target = f"≤ {limit_ms:g} ms"
    if not times:
        return (what, MISSING, target, "-")
    return (what, spread(times, "ms"), target, _verdict(statistics.median(times), limit_ms, where))


def _cell(what: str, value: float | None, unit: str, limit: float, where: str) -> tuple[str, ...]:
    target = f"≤ {limit:g} {unit}"
    if value is None:
        return (what, MISSING, target, "-")
    return (what, f"{value:.3g} {unit}", target, _verdict(value, limit, where))


def targets_table(
    costs: dict[int, Cost | None],
    status: dict[int, Status | None],
    alone: Relaunch | None,
    noticed: list[float] | None,
    failures: list[str],
) -> Table:
    """Reached or missed, and where the parts of what was missed are."""
    eight, hundred, shown = costs.get(8), costs.get(100), status[_OF_TARGETS]
    rows = (
        _times("crash to relaunch, one process, no back-off", alone.total if alone else None, RELAUNCH_MS, RELAUNCH),
        _cell(
            "CPU of a core, 8 engines polled every 5 s", eight.cpu_percent if eight else None, "%", CPU_PERCENT, THREADS
        ),
        _cell("resident memory, 8 engines", eight.memory.rss_mib if eight else None, "MiB", RESIDENT_MIB, IMPORTS),
        _times(f"`status`, {_OF_TARGETS} engines and six GPUs", shown.status if shown else None, STATUS_MS, STATUS),
        _cell("CPU of a core, 100 engines", hundred.cpu_percent if hundred else None, "%", CPU_OF_100_PERCENT, THREADS),
        _times("readiness told after the engine answers, while starting", noticed, NOTICED_MS),
    )
    notes = (
        "Medians are judged. What a missed target would take is in the table named beside it: to do without a part.",
        (
            f"On: polls every {scale.POLL_S} s, `/metrics` scraped every {SCRAPE_S} s, a webhook by HTTPS for all"
            " events (which refuses), history. Canaries come after 60 s without work: at most one per engine in a"
            " window. No GPU here, so no helper for NVML."
        ),
        *failures,
    )
    return Table("Targets", ("what", "measured", "target", ""), rows, notes)


# ---- what it costs --------------------------------------------------------------------------------------------------


def _scale(found: Sequence[Cost]) -> Table:
    rows = tuple(
        (
            str(one.engines),
            f"{one.cpu_percent:.3f}",
            f"{one.floor_percent:.3f}",
            f"{one.cpu_percent / one.engines:.4f}",
            f"{one.memory.rss_mib:.1f} ({one.memory.pss_mib:.1f})",
            str(one.threads),
            str(one.fds),
        )
        for one in found
    )
    notes = ["Floor: a bare Python whose sockets ask the same of the same engines and look at no answer."]
    if len(found) > 1:
        first, last = found[0], found[-1]
        more = last.engines - first.engines
        notes.append(
            f"From {first.engines} to {last.engines} engines each one more costs"
            f" {(last.cpu_percent - first.cpu_percent) / more:.4f} % of a core,"
            f" {(last.memory.rss_mib - first.memory.rss_mib) / more * 1024:.0f} KiB,"
            f" {(last.threads - first.threads) / more:.2f} threads and"
            f" {(last.fds - first.fds) / more:.2f} file descriptors."
        )
    header = ("engines", "CPU, % of a core", "floor", "CPU by engine", "MiB (PSS)", "threads", "file descriptors")
    return Table("Cost by number of engines, polled every 5 s", header, rows, tuple(notes))


def _threads(found: Sequence[Cost]) -> Table:
    kinds = sorted(
        {kind for one in found for kind, used in one.by_thread.items() if used > UNSEEN_PERCENT},
        key=lambda kind: -max(one.by_thread.get(kind, 0) for one in found),
    )
    rows = tuple((kind, *(f"{one.by_thread.get(kind, 0):.3f}" for one in found)) for kind in kinds)
    header = ("thread", *(f"{one.engines} engines" for one in found))
    return Table(THREADS, header, rows)


def turns_table(found: Sequence[Cost]) -> Table:
    """How long the loop is not to be had."""
    rows = []
    idle = [(str(one.engines), one.turns_ms) for one in found]
    killed = [(f"{one.engines}, one killed every second for {_KILLS:g} s", one.turns_in_kills_ms) for one in found]
    for what, turns in (*idle, *killed):
        if turns:
            p99 = f"{quantile(turns, 0.99):.2f}" if len(turns) >= _FOR_P99 else "-"
            rows.append((what, str(len(turns)), f"{quantile(turns, 0.5):.2f}", p99, f"{max(turns):.2f}"))
    notes = (
        (
            "A turn is one observation: decided, persisted, published, set in motion. Whatever comes meanwhile waits "
            "for its end. Each turn of the window, by a probe in the daemon; `/metrics` has the same as a histogram."
        ),
        (
            f"Killed: {_KILLS} times the API server of one engine after the other, and the turns until all were ready"
            " again. p99 only of 100 turns and more."
        ),
    )
    header = ("engines", "turns", "p50, ms", "p99, ms", "max, ms")
    return Table("Turns of the loop", header, tuple(rows), notes)


def _adoption(found: Sequence[Cost]) -> Table:
    rows = tuple(
        (
            str(one.engines),
            spread([adoption.answers_s for adoption in one.adoptions], "s", 2),
            spread([adoption.ready_s for adoption in one.adoptions], "s", 2),
            spread([adoption.cpu_s for adoption in one.adoptions], "s", 2),
        )
        for one in found
        if one.adoptions
    )
    notes = (
        (
            "SIGKILL of the daemon, and from the start of the next one: until it answers, and until its status shows "
            "all engines as ready, in the processes that they had."
        ),
    )
    return Table(
        "Adoption",
        ("engines", "until `status` answers", "until all are ready", "CPU of the daemon until then"),
        rows,
        notes,
    )


def _polls(looks: list[float] | None, found: Sequence[Cost]) -> Table:
    rows = (
        [("one look: `/health` and `/metrics` over a new connection, parsed", spread(looks, "µs", 0))] if looks else []
    )
    if len(found) > 1:
        first, last = found[0], found[-1]
        slope = (last.cpu_percent - first.cpu_percent) / (last.engines - first.engines) / 100 * scale.POLL_S * 1e6
        rows.append(
            (f"all that one more look causes, from {first.engines} to {last.engines} engines", f"{slope:.0f} µs")
        )
    notes = (
        (
            "The first is CPU of the looking thread, one look after the other. The second has everything in it: "
            "looking at processes, turns, rules, history, threads that wait."
        ),
    )
    return Table("CPU of a poll", ("what", "CPU"), tuple(rows), notes)


# ---- where time and memory go ---------------------------------------------------------------------------------------


def _relaunch(found: dict[str, Relaunch | None], bare: list[float] | None) -> Table:
    rows, notes = [], []
    for kind, one in found.items():
        if one is None:
            continue
        count = statistics.median(one.fsyncs)
        fsync = f"{spread(one.fsync, 'ms')} in {count:g}"
        parts = (spread(one.gone, "ms"), spread(one.told, "ms"), fsync, spread(one.spawn, "ms"))
        rows.append((kind, spread(one.total, "ms"), *parts))
        left = [total - fsync for total, fsync in zip(one.total, one.fsync, strict=True)]
        notes.append(f"{kind}: {spread(left, 'ms')} without the time in fsync.")
    if bare:
        notes.append(
            f"The same script started by nothing but `subprocess`, to its first instruction: {spread(bare, 'ms')}."
        )
    notes.append("By a probe in the daemon. Parts may overlap: fsyncs of two threads, the spawn with either.")
    notes.append(
        "To prove that nothing of the old engine is left, the daemon looks at all processes of the machine twice, "
        f"about 10 µs for each with a session; here were {len(procfs.census().processes)}."
    )
    header = (
        "engine",
        "SIGKILL to first instruction",
        "until the kernel has ended it",
        "until the exit is told",
        "in fsync",
        "in the spawn",
    )
    return Table(RELAUNCH, header, tuple(rows), tuple(notes))


def _status_split(status: dict[int, Status | None]) -> Table:
    rows = []
    for count, one in status.items():
        if one is None:
            continue
        bare, ours, others = statistics.median(one.bare), one.ours_us / 1000, one.others_us / 1000
        rest = statistics.median(one.status) - bare
        cells = (
            spread(one.status, "ms"),
            spread(one.floor, "ms"),
            f"{bare:.1f}",
            f"{ours:.1f}",
            f"{others:.1f}",
            f"{rest:.1f}",
        )
        rows.append((str(count), *cells))
    notes = (
        (
            "Floor: `python -c 'import argparse, json, socket'`, by turns with it. Imports are as `-X importtime` has "
            "them, which takes time itself: they say which part is large, and do not add up."
        ),
    )
    header = (
        "engines",
        "status",
        "floor",
        "bare Python, ms",
        "our modules, ms",
        "other modules, ms",
        "all beside bare Python, ms",
    )
    return Table(STATUS, header, tuple(rows), notes)


def _imports(grown: list[tuple[str, float]]) -> Table:
    rows = tuple((name, f"{size:.1f}") for name, size in grown)
    notes = (
        (
            f"A Python that imports these in this order; together {sum(size for _, size in grown):.1f} MiB. What the "
            "daemon has beyond that is its own work."
        ),
    )
    return Table(IMPORTS, ("import", "resident, MiB"), rows, notes)
