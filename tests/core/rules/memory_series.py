"""Generated memory over time, seeded: what leaks, and what only looks like it. `python -m` prints the rates.

A series is a function from seconds since ready to MiB above where it started.
"""

from __future__ import annotations

import csv
import math
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

from supervisord.core.memory import HOUR_S, MIB, MemoryWatch, observed
from supervisord.core.spec import RestartSpec

Series = Callable[[float], float]
Maker = Callable[[random.Random], Series]

LOOK_EVERY_S: Final = 30.0
LEAK_MIB_PER_H: Final = 120e6 / MIB
START_MIB: Final = 20_000
MEASURED: Final = Path(__file__).parents[2] / "data/cuda-0.24/gpu-memory-under-steady-load.csv"


def measured_steps() -> list[tuple[float, float]]:
    """(seconds since the first step, MiB) of every step in the measured file."""
    steps, before = [], None
    with MEASURED.open() as lines:
        for row in csv.DictReader(lines):
            used = int(row["pids"].split(":")[1])
            if before is not None and used != before:
                steps.append((float(row["t"]), (used - before) / MIB))
            before = used
    return [(at - steps[0][0], size) for at, size in steps]


STEPS: Final = measured_steps()


def noise(r: random.Random) -> Series:
    """White noise, 2 to 60 MiB."""
    sigma = r.uniform(2, 60)
    return lambda _t: r.gauss(0, sigma)


def load(r: random.Random) -> Series:
    """Load that wanders: mean-reverting over 1 to 60 minutes, 20 to 150 MiB."""
    tau_s, sigma, level = r.uniform(60, 3600), r.uniform(20, 150), 0.0
    pull = LOOK_EVERY_S / tau_s

    def series(_t: float) -> float:
        nonlocal level
        level += sigma * math.sqrt(2 * pull) * r.gauss(0, 1) - pull * level
        return level

    return series


def steps(r: random.Random, tau_s: tuple[float, float]) -> Series:
    """3 to 8 steps of 130 to 256 MiB, ever rarer."""
    tau, noisy = r.uniform(*tau_s), noise(r)
    jumps = [(r.expovariate(1 / tau), r.uniform(130, 256)) for _ in range(r.randint(3, 8))]
    return lambda t: sum(size for at, size in jumps if at <= t) + noisy(t)


def measured(r: random.Random, slower: tuple[float, float]) -> Series:
    """The measured steps, that many times slower, beginning within the first 6 hours."""
    factor, begin = math.exp(r.uniform(*map(math.log, slower))), r.choice((0.0, r.uniform(0, 6 * HOUR_S)))
    return lambda t: sum(size for at, size in STEPS if begin + at * factor <= t)


def sawtooth(r: random.Random, minutes: tuple[float, float]) -> Series:
    """Up and down by 0.5 to 4 GiB, any shape from a ramp up to a ramp down."""
    period_s, height, noisy = 60 * r.uniform(*minutes), r.uniform(512, 4096), noise(r)
    rise, phase = r.uniform(0.05, 0.95), r.random()

    def series(t: float) -> float:
        x = (t / period_s + phase) % 1
        return height * (x / rise if x < rise else (1 - x) / (1 - rise)) + noisy(t)

    return series


def day(r: random.Random, height_mib: tuple[float, float]) -> Series:
    """Day and night, from any hour of the day on."""
    height, phase, noisy = r.uniform(*height_mib), r.random(), load(r)
    return lambda t: height * (1 - math.cos(2 * math.pi * (t / (24 * HOUR_S) + phase))) / 2 + 0.3 * noisy(t)


def plateau(r: random.Random) -> Series:
    """An allocator that fills up: 0.1 to 2 GiB, time constants of 3 minutes to 2 hours."""
    height, tau_s, noisy = r.uniform(100, 2000), HOUR_S * r.uniform(0.05, 2), noise(r)
    return lambda t: height * (1 - math.exp(-t / tau_s)) + noisy(t)


def fragments(r: random.Random) -> Series:
    """An allocator that keeps the largest peak it has seen."""
    sigma, noisy, peak = r.uniform(50, 300), noise(r), 0.0

    def series(t: float) -> float:
        nonlocal peak
        peak = max(peak, r.gauss(0, sigma))
        return peak + 0.2 * noisy(t)

    return series


def leak(r: random.Random, over: Maker, rate: tuple[float, float] = (LEAK_MIB_PER_H, LEAK_MIB_PER_H)) -> Series:
    """A steady leak under something else."""
    slope, other = math.exp(r.uniform(math.log(rate[0]), math.log(rate[1]))), over(r)
    return lambda t: slope * t / HOUR_S + other(t)


def leak_in_pieces(r: random.Random) -> Series:
    """The same, in pieces of 2 to 64 MiB."""
    piece, noisy = r.uniform(2, 64), noise(r)
    return lambda t: LEAK_MIB_PER_H * t / HOUR_S // piece * piece + noisy(t)


LEAKS: Final[Mapping[str, Maker]] = {
    "120 MB/h, noise": partial(leak, over=noise),
    "120 MB/h in pieces, noise": leak_in_pieces,
    "120 MB/h, wandering load": partial(leak, over=load),
    "120 MB/h, sawtooth of GiB": partial(leak, over=partial(sawtooth, minutes=(5, 60))),
    "200 to 10,000 MiB/h, wandering load": partial(leak, over=load, rate=(200, 10_000)),
}

HARMLESS: Final[Mapping[str, Maker]] = {
    "noise": noise,
    "wandering load": load,
    "steps within about half an hour": partial(steps, tau_s=(30, 900)),
    "measured steps, 1 to 60 times slower": partial(measured, slower=(1, 60)),
    "sawtooth, 5 to 60 min": partial(sawtooth, minutes=(5, 60)),
    "day and night below the margin": partial(day, height_mib=(50, 512)),
    "allocator plateau": plateau,
    "allocator fragments": fragments,
}

LOOKS_LIKE_A_LEAK: Final[Mapping[str, Maker]] = {
    "steps over hours": partial(steps, tau_s=(1800, 3 * HOUR_S)),
    "measured steps, 60 to 600 times slower": partial(measured, slower=(60, 600)),
    "sawtooth, 1 to 6 h": partial(sawtooth, minutes=(60, 360)),
    "day and night of 0.5 to 4 GiB": partial(day, height_mib=(512, 4096)),
}


def looks(series: Series, hours: float, every_s: float = LOOK_EVERY_S) -> Iterator[tuple[float, int]]:
    """(time, bytes) as the daemon would see them."""
    for index in range(int(hours * HOUR_S / every_s)):
        yield index * every_s, int((START_MIB + series(index * every_s)) * MIB)


def told_after_h(series: Series, hours: float, spec: RestartSpec) -> float | None:
    """Hours until it is called a leak; None: never."""
    watch = MemoryWatch()
    for at_s, used in looks(series, hours):
        watch = observed(watch, at_s, used, None, spec)
        if watch.creeping:
            return at_s / HOUR_S
    return None


def _case(name: str, seed: int) -> float | None:
    series = {**LEAKS, **HARMLESS, **LOOKS_LIKE_A_LEAK}[name](random.Random(f"{name} {seed}"))
    return told_after_h(series, 24 if "day" in name else 12, RestartSpec())


def cases(name: str, count: int) -> list[float]:
    """Hours after which each of `count` series was called a leak, ascending, without those that never were."""
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        told = pool.map(partial(_case, name), range(count), chunksize=20)
        return sorted(hours for hours in told if hours is not None)


def main(count: int) -> None:
    """Print the tables of docs/creep.md."""
    for name in LEAKS:
        told = cases(name, count)
        within = sum(hours <= 6 for hours in told)
        spread = [f"{told[int(part * (len(told) - 1))]:.1f}" for part in (0.5, 0.95, 1)] if told else ["-"] * 3
        print(f"| {name} | {within / count:.1%} | {len(told) / count:.1%} | {' | '.join(spread)} |", flush=True)
    for name in (*HARMLESS, *LOOKS_LIKE_A_LEAK):
        told = cases(name, count)
        print(f"| {name} | {len(told)} of {count} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
