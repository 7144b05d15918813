"""What is measured with each supervisor: every function takes one that is not started and returns figures."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from queue import Empty

from tests.bench.peer import Peer
from tests.bench.processes import Memory, cpu_percent, kill, memory
from tests.sim.engine import alive, wait_until

ALONE = {"children": False}
"""A mood: the engine is one process, so that no supervisor has more to end than another."""
SETTLE_S = 3.0
"""What a start leaves to be done is not what idling costs."""
LOADS_S = 3.0
HANGS = ("frozen", "deaf")
_KNOWN_S = 60.0


def relaunch_ms(peer: Peer, kills: int) -> list[float]:
    """From SIGKILL of an engine that has run to the first instruction of the next one.

    Who looks by the clock has started the engine at a look: a random rest before each kill meets it at any time between
    two looks, the same way in every run.
    """
    took, rng = [], random.Random(peer.name)
    with peer:
        peer.start("e0", **ALONE)
        (engine,) = peer.engines
        with engine.telling() as told:
            for starts in range(1, kills + 1):
                peer.wait_settled(engine, starts)
                time.sleep(rng.uniform(0, peer.looks_every_s))
                (pid,) = engine.servers()
                while not told.empty():
                    told.get()
                before = time.monotonic()
                kill([pid])
                took.append((told.get(timeout=60) - before) * 1000)
    return took


def staggered_relaunch_ms(peer: Peer, kills: int) -> list[float]:
    """The same with an engine for each kill, for a supervisor that waits long: each is killed once, 0.2 s apart."""
    with peer:
        peer.start(*(f"e{number}" for number in range(kills)), **ALONE)
        for engine in peer.engines:
            peer.wait_settled(engine, 1)
        killed_at = []
        with ExitStack() as stack:
            queues = [stack.enter_context(engine.telling()) for engine in peer.engines]
            for engine in peer.engines:
                (pid,) = engine.servers()
                killed_at.append(time.monotonic())
                kill([pid])
                time.sleep(0.2)
            return [(queue.get(timeout=60) - at) * 1000 for queue, at in zip(queues, killed_at, strict=True)]


@dataclass(frozen=True)
class Idle:
    """What a supervisor costs while its engines only run, and what asking it takes."""

    cpu_percent: float
    memory: Memory
    status_ms: list[float]
    floor_ms: list[float]


def idle(peer: Peer, engines: int, seconds: float, status_runs: int) -> Idle:
    """With so many engines; without `status_runs` nobody asks."""
    with peer:
        peer.start(*(f"e{number}" for number in range(engines)), sleeps=True)
        peer.wait_up()
        time.sleep(SETTLE_S)
        own = peer.own()
        percent, _ = cpu_percent(lambda: own, seconds)
        used = memory(own)
        times = peer.status_times(status_runs) if status_runs else ([], [])
    return Idle(percent, used, *times)


def readiness_lag_s(peer: Peer) -> float:
    """From the engine's first answer to the first status command that calls it up; negative: it said so before."""
    with peer:
        peer.start("e0", ready_delay_s=LOADS_S, **ALONE)
        with peer.prober(peer.engines[0], 60) as prober:
            claimed = wait_until(lambda: time.monotonic() if peer.seen("e0").up else 0.0, 60, "a claim", 0.0)
            told, _ = prober.communicate(timeout=90)
    return claimed - float(told.split()[0])


@dataclass(frozen=True)
class Orphans:
    """After SIGKILL of an API server: how many of its other processes lived when the next one began, and later."""

    at_start: int
    later: int
    of: int
    relaunch_s: float


def orphans(peer: Peer, timeout_s: float) -> Orphans:
    """A tree like vLLM's loses its API server."""
    with peer:
        peer.start("e0")
        (engine,) = peer.engines
        peer.wait_settled(engine, 1)
        rest = wait_until(engine.workers, 30, "EngineCore")
        with engine.telling() as told:
            began = time.monotonic()
            kill(engine.servers())
            try:
                took_s = told.get(timeout=timeout_s) - began
            except Empty:
                raise TimeoutError(f"no next engine within {timeout_s:g} s") from None
            at_start = sum(map(alive, rest))
        time.sleep(2)
        return Orphans(at_start, sum(map(alive, rest)), len(rest), took_s)


@dataclass(frozen=True)
class Killed:
    """After SIGKILL of the supervisor: whether its engine lived, and what became of it when it was started again."""

    survived: bool
    serves_on: bool
    more_starts: int
    known_s: float | None
    """Seconds from the new start until its status shows the old process as up; None: never, or with a second copy."""


def killed(peer: Peer, watch_s: float) -> Killed:
    """Everything of the supervisor itself is killed at once, and it is started again a second later."""
    with peer:
        peer.start("e0", **ALONE)
        (engine,) = peer.engines
        peer.wait_settled(engine, 1)
        (old,) = engine.servers()
        wait_until(lambda: peer.seen("e0").up, 60, "a claim", 0.05)
        own = peer.own()
        killed_at = time.monotonic()
        kill(own)
        time.sleep(1)
        survived = alive(old)
        began = killed_at if peer.revives_itself else time.monotonic()
        peer.revive()
        known_s = None
        # Who is slow to know it again, but starts no second copy, is waited for.
        while (took_s := time.monotonic() - began) < watch_s or (
            took_s < _KNOWN_S and known_s is None and engine.starts() == 1 and alive(old)
        ):
            seen = peer.seen("e0")
            if known_s is None and seen.up and seen.pid in (old, None):
                known_s = time.monotonic() - began
            time.sleep(0.01)
        more = engine.starts() - 1
        return Killed(survived, alive(old), more, known_s if alive(old) and not more else None)


def hang_s(bounds_s: Mapping[Peer, float]) -> dict[str, dict[str, float | None]]:
    """Per supervisor and kind of hang: seconds until it was started again, None if not within its bound.

    All run at once, so that only the longest bound is waited for. Their contexts are open, and they are not started.
    """
    peers = list(bounds_s)
    for peer in peers:
        peer.start(*HANGS, changes=True)
    for peer in peers:
        peer.wait_up()
        for engine in peer.engines:
            peer.wait_settled(engine, 1)
    began: dict[Peer, float] = {}
    took: dict[str, dict[str, float | None]] = {peer.name: dict.fromkeys(HANGS) for peer in peers}
    for peer in peers:
        frozen, deaf = peer.engines
        frozen.mood.patch(freeze=True)
        deaf.mood.patch(hang=True)
        began[peer] = time.monotonic()
    while waiting := [
        (peer, engine)
        for peer in peers
        for engine in peer.engines
        if took[peer.name][engine.name] is None and time.monotonic() < began[peer] + bounds_s[peer]
    ]:
        for peer, engine in waiting:
            if engine.starts() > 1:
                took[peer.name][engine.name] = time.monotonic() - began[peer]
        time.sleep(0.05)
    return took
