"""Us beside supervisord, circus, runit, PM2 and systemd with a plain unit: the same engines, one after the other."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import supervisord as us
from tests.bench import measures
from tests.bench.attempts import MISSING, Attempts
from tests.bench.machines import DefaultUnit, OursAsService, PlainUnit
from tests.bench.measures import Idle, Killed, Orphans
from tests.bench.own import Ours, OursByDefault, Settings
from tests.bench.peer import Peer
from tests.bench.report import Table, spread
from tests.bench.supervisors import Circus, Pm2, Runit, Supervisord, installed

ALL: Final[tuple[type[Peer], ...]] = (Supervisord, Circus, Runit, Pm2, PlainUnit, Ours, OursAsService)
IMPATIENT: Final = Settings(
    supervisor={"poll_interval_s": 1, "max_parallel_starts": 8},
    probe={"timeout_s": 2, "canary_after_s": 5, "canary_deadline_s": 5, "canary_failures": 2},
    restart={"stall_after_s": 10, "unreachable_after_s": 10},
)
"""Our settings for the hang: with the defaults the bound would be minutes."""
_RELAUNCH_S: Final = 25.0


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    kills: int = 20
    engines: tuple[int, ...] = (1, 8, 100)
    idle_s: float = 20
    status_runs: int = 6
    readiness: int = 2
    watch_s: float = 8
    hang_s: float = 45
    default_hang_s: float | None = 420
    """For ours with its defaults, None: left out."""


QUICK: Final = Size(
    kills=2, engines=(1, 2), idle_s=1, status_runs=2, readiness=1, watch_s=3, hang_s=25, default_hang_s=None
)
_STATUS_OF: Final = (1, 8)


def tables(options: argparse.Namespace) -> list[Table]:
    """All of them."""
    size = QUICK if options.quick else Size()
    idle = _all_idle(size)
    return [
        _configurations(),
        _relaunch(size),
        _memory(size, *idle),
        _status(size, *idle),
        _readiness(size),
        _orphans(),
        _killed(size),
        _hang(size),
    ]


# ---- what was run ---------------------------------------------------------------------------------------------------


def _first_line(*argv: str) -> str:
    done = subprocess.run(argv, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()[0]


def _pm2_version() -> str:
    package = json.loads(Path(installed("pm2/node_modules/pm2/package.json")).read_text(encoding="utf-8"))
    return f"{package['version']}, node {_first_line('node', '--version')}"


def _systemd_version() -> str:
    return _first_line("systemctl", "--version").split()[1]


_VERSIONS: Final[dict[str, Callable[[], str]]] = {
    Supervisord.name: lambda: _first_line(installed("venv/bin/supervisord"), "--version"),
    Circus.name: lambda: _first_line(installed("venv/bin/circusd"), "--version"),
    Runit.name: lambda: _first_line("dpkg-query", "--show", "--showformat=${Version}\n", "runit"),
    Pm2.name: _pm2_version,
    PlainUnit.name: _systemd_version,
    Ours.name: lambda: us.__version__,
    OursAsService.name: lambda: f"{us.__version__}, systemd {_systemd_version()}",
}


def _configurations() -> Table:
    attempts = Attempts()
    rows = tuple(
        (peer.name, attempts.of(f"the version of {peer.name}", _VERSIONS[peer.name]) or MISSING, peer.what)
        for peer in ALL
    )
    notes = (
        "Engines are the simulated `vllm serve` of the tests, the same for all; none needs a GPU.",
        (
            "For us back-off and warm-up are off, since the others have neither. By default we wait 1 s before the "
            "first new try, twice as long before each further one, and warm the engine up before it is ready."
        ),
        *attempts.notes,
    )
    return Table("What was run", ("supervisor", "version", "configuration"), rows, notes)


# ---- crash to relaunch ----------------------------------------------------------------------------------------------

_DELAYS: Final = {
    Supervisord.name: "its loop: each second",
    Circus.name: "looks every 5 s (`check_delay`)",
    Runit.name: "none, after a second of life",
    Pm2.name: "none",
    PlainUnit.name: "10 s (`RestartSec=10`)",
    DefaultUnit.name: "0.1 s (`RestartSec=`)",
    Ours.name: "none",
    OursAsService.name: "none",
}


def _relaunch(size: Size) -> Table:
    attempts, rows = Attempts(), []
    order: tuple[type[Peer], ...] = (*ALL[:5], DefaultUnit, *ALL[5:])
    for peer in order:
        measure = measures.staggered_relaunch_ms if peer is PlainUnit else measures.relaunch_ms

        def once(peer: type[Peer] = peer, measure: Callable[[Peer, int], list[float]] = measure) -> list[float]:
            return measure(peer(), size.kills)

        times = attempts.of(f"crash to relaunch, {peer.name}", once)
        rows.append((peer.name, spread(times, "ms") if times else MISSING, _DELAYS[peer.name]))
    notes = (
        (
            "From SIGKILL of the engine, one process that has run for a second (ours: is ready), to the first "
            "instruction of the next one. Who looks by the clock (supervisord each second, circus every 5 s) is hit at "
            "random times between two looks."
        ),
        "systemd, plain unit: an engine for each kill, 0.2 s apart, so that the 10 s are waited for once.",
        "Ours first proves that nothing of the old engine is left, and writes a record to disk (fsync).",
        *attempts.notes,
    )
    return Table("Crash to relaunch", ("supervisor", "median (range)", "delay of its own"), tuple(rows), notes)


# ---- idle and status ------------------------------------------------------------------------------------------------

_Idles = dict[tuple[str, int], "Idle | None"]


def _all_idle(size: Size) -> tuple[_Idles, list[str]]:
    attempts, found = Attempts(), {}
    for peer in ALL:
        for count in size.engines:
            runs = size.status_runs if count in _STATUS_OF else 0

            def once(peer: type[Peer] = peer, count: int = count, runs: int = runs) -> Idle:
                return measures.idle(peer(), count, size.idle_s, runs)

            found[peer.name, count] = attempts.of(f"{peer.name} with {count} engines", once)
    return found, attempts.notes


def _memory(size: Size, found: _Idles, failures: list[str]) -> Table:
    rows = []
    for peer in ALL:
        cells = [found[peer.name, count] for count in size.engines]
        used = [f"{one.memory.rss_mib:.1f} ({one.memory.pss_mib:.1f})" if one else MISSING for one in cells]
        percent = [f"{one.cpu_percent:.3f}" if one else MISSING for one in cells]
        processes = [str(one.memory.processes) if one else MISSING for one in cells]
        rows.append((peer.name, *used, *percent, " / ".join(processes)))
    header = (
        "supervisor",
        *(f"MiB, {count}" for count in size.engines),
        *(f"CPU %, {count}" for count in size.engines),
        "processes",
    )
    notes = (
        (
            "Resident memory (and PSS, which divides what processes share) and CPU in percent of a core over "
            f"{size.idle_s:g} s with so many engines, of the supervisor's own processes, without the engines."
        ),
        (
            "Ours asks each simulated engine for `/health` and `/metrics` every 5 s, and runs without listener and "
            "webhook; the part `ours` has all parts on. The others ask nothing, and their engines only sleep."
        ),
        (
            "systemd is PID 1 and journald: on the machine anyway, also with ours as services, where only our own "
            "daemon is counted."
        ),
        *failures,
    )
    return Table("Memory and CPU with idle engines", header, tuple(rows), notes)


def _status(size: Size, found: _Idles, failures: list[str]) -> Table:
    counts = [count for count in size.engines if count in _STATUS_OF]
    rows = []
    for peer in ALL:
        cells: list[str] = []
        for count in counts:
            one = found[peer.name, count]
            cells += [spread(one.status_ms, "ms", 0), spread(one.floor_ms, "ms", 0)] if one else [MISSING] * 2
        rows.append((peer.name, *cells))
    header = ("supervisor", *(f"{what}, {count}" for count in counts for what in ("status", "floor")))
    notes = (
        (
            "`supervisorctl status`, `circusctl status`, `sv status`, `pm2 ls`, `systemctl status`, "
            "`vllm-supervisor status`, with so many engines."
        ),
        "Floor: `python -c 'import argparse, json, socket'`, run by turns with the command.",
        *failures,
    )
    return Table("The status command", header, tuple(rows), notes)


# ---- readiness ------------------------------------------------------------------------------------------------------


def _readiness(size: Size) -> Table:
    attempts, rows = Attempts(), []
    for peer in ALL:

        def once(peer: type[Peer] = peer) -> list[float]:
            return [measures.readiness_lag_s(peer()) for _ in range(size.readiness)]

        lags = attempts.of(f"readiness, {peer.name}", once)
        rows.append((peer.name, spread(lags, "s", 2) if lags else MISSING, _in_words(lags)))
    notes = (
        (
            f"An engine answers {measures.LOADS_S:g} s after its start. The lag is from that answer to the end of the "
            "first status command that calls it up, asked again and again: the command's own time is in it. Negative: "
            "called up before it answered."
        ),
        "A real model loads for minutes: the others are early by nearly all of that.",
        "Called up: RUNNING (supervisord), active (circus, systemd), run (runit), online (PM2), ready (ours).",
        *attempts.notes,
    )
    return Table("Up, says the status command", ("supervisor", "lag", "in words"), tuple(rows), notes)


def _in_words(lags: list[float] | None) -> str:
    if not lags:
        return MISSING
    if max(lags) < 0:
        return "before it answers"
    return "after it answers" if min(lags) > 0 else "about when it answers"


# ---- orphans, a killed supervisor, hangs ----------------------------------------------------------------------------


def _orphans() -> Table:
    attempts, rows = Attempts(), []
    for peer in ALL:

        def once(peer: type[Peer] = peer) -> Orphans:
            return measures.orphans(peer(), _RELAUNCH_S)

        one = attempts.of(f"orphans, {peer.name}", once)
        if one is None:
            rows.append((peer.name, *[MISSING] * 3))
            continue
        gone = "yes" if one.at_start == 0 else "**no**"
        rows.append((peer.name, gone, f"{one.later} of {one.of}", f"{one.relaunch_s:.1f} s"))
    notes = (
        (
            "The engine is vLLM's tree: API server, EngineCore and worker in one session. SIGKILL hits the API server "
            "alone; the others would hold the GPU memory and, as in vLLM, do not notice."
        ),
        "Gone or not is looked at, and the relaunch ends, at the first instruction of the next engine.",
        *attempts.notes,
    )
    header = ("supervisor", "old engine gone before the next one starts", "orphans 2 s later", "relaunch")
    return Table("A tree that lost its parent", header, tuple(rows), notes)


def _killed(size: Size) -> Table:
    attempts, rows = Attempts(), []
    for peer in ALL:
        if not peer.can_be_killed:
            rows.append((peer.name, *["is PID 1"] * 4))
            continue

        def once(peer: type[Peer] = peer) -> Killed:
            return measures.killed(peer(), size.watch_s)

        one = attempts.of(f"a killed supervisor, {peer.name}", once)
        if one is None:
            rows.append((peer.name, *[MISSING] * 4))
            continue
        known = "never" if one.known_s is None else f"{one.known_s:.1f} s"
        serves = "yes" if one.serves_on else "**no**"
        rows.append((peer.name, "yes" if one.survived else "no", serves, str(one.more_starts), known))
    header = ("supervisor", "engine survives", "and serves on", "second copies started", "known again after")
    notes = (
        (
            "All processes of the supervisor get SIGKILL. A second later it is started again and watched for "
            f"{size.watch_s:g} s; time counts from that start. Ours as a service is started by systemd, "
            f"{_UNIT_DELAY}; there it counts from the kill."
        ),
        "A second copy finds its port taken, ends, and is tried again.",
        "Known again: the status command shows the old process as up, and no second copy was started.",
        *attempts.notes,
    )
    return Table("The supervisor is killed and started again", header, tuple(rows), notes)


_UNIT_DELAY: Final = "after 50 ms with the unit of the tests, after 1 s with the one of the package"


_IMPATIENTLY: Final = (
    "`poll_interval_s = 1`, `canary_after_s = 5`, `canary_deadline_s = 5`, `canary_failures = 2`, `stall_after_s = "
    "10`, `unreachable_after_s = 10`"
)


def _hang(size: Size) -> Table:
    attempts = Attempts()
    bounds_s: dict[type[Peer], float] = {_impatient(peer): size.hang_s for peer in ALL}
    if size.default_hang_s is not None:
        bounds_s[OursByDefault] = size.default_hang_s

    def once() -> dict[str, dict[str, float | None]]:
        with contextlib.ExitStack() as stack:
            return measures.hang_s({stack.enter_context(peer()): bound_s for peer, bound_s in bounds_s.items()})

    took = attempts.of("hangs, all at once", once)
    rows = []
    for peer, bound_s in bounds_s.items():
        cells = [
            MISSING if took is None else f"never within {bound_s:g} s" if one is None else f"{one:.1f} s"
            for one in ((took or {}).get(peer.name) or dict.fromkeys(measures.HANGS)).values()
        ]
        rows.append((peer.name, *cells))
    notes = (
        "Seconds until the next engine's code runs.",
        f"Ours is set for this test: {_IMPATIENTLY}. The defaults are 5, 60, 30, 3, 180 and 300.",
        *([_BY_DEFAULT] if size.default_hang_s is not None else []),
        (
            "None of the others asks a service by HTTP. supervisord has an add-on that does (`httpok` of superlance, "
            "not installed here): it sees what `/health` shows, so not the first of these hangs."
        ),
        *attempts.notes,
    )
    header = ("supervisor", "nothing is computed, `/health` stays 200", "nothing answers, `/health` neither")
    return Table("A hang is noticed and the engine started again", header, tuple(rows), notes)


_BY_DEFAULT: Final = (
    f"{OursByDefault.name}: nothing is set, so that it also warms the engine up, gives it longer to end, and waits 1 s "
    "before the new try. The same hangs at the same time, watched for longer. How much of the 60 s before a canary had "
    "passed already is chance."
)


def _impatient(peer: type[Peer]) -> type[Peer]:
    return type(peer.__name__, (peer,), {"settings": IMPATIENT}) if peer.polls else peer
