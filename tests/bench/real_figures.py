"""The arithmetic behind the figures of a real engine: intervals that say how much noise there is, and trends."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

_Z = statistics.NormalDist().inv_cdf(0.975)


class Interval(NamedTuple):
    """An estimate and its 95 % confidence interval."""

    value: float
    low: float
    high: float


def t_quantile(degrees: int) -> float:
    """97.5 % quantile of Student's t, within 1 % from 3 degrees of freedom on (Abramowitz and Stegun, 26.7.5)."""
    terms = (
        (_Z**3 + _Z) / 4,
        (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / 96,
        (3 * _Z**7 + 19 * _Z**5 + 17 * _Z**3 - 15 * _Z) / 384,
    )
    return math.fsum([_Z, *(term / degrees**power for power, term in enumerate(terms, 1))])


def ratio(pairs: Sequence[tuple[float, float]]) -> Interval:
    """Geometric mean of a / b over pairs that were measured side by side: Student's t on the logarithms."""
    logs = [math.log(a / b) for a, b in pairs]
    mean = statistics.fmean(logs)
    half = t_quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def slope(times: Sequence[float], values: Sequence[float]) -> Interval:
    """Least squares, per unit of time.

    Neighbouring samples resemble each other: with the lag-1 correlation r of the residuals, n of them are worth
    n (1 - r) / (1 + r) independent ones. Without that the interval of a wandering series is far too narrow.
    """
    line = statistics.linear_regression(times, values)
    rest = [value - line.slope * at - line.intercept for at, value in zip(times, values, strict=True)]
    squares = sum(x * x for x in rest)
    if not squares:
        return Interval(line.slope, line.slope, line.slope)
    r = min(max(sum(a * b for a, b in itertools.pairwise(rest)) / squares, 0.0), 0.95)
    worth = (1 - r) / (1 + r)
    middle = statistics.fmean(times)
    error = math.sqrt(squares / (len(rest) - 2) / worth / sum((at - middle) ** 2 for at in times))
    half = t_quantile(max(3, int(len(rest) * worth) - 2)) * error
    return Interval(line.slope, line.slope - half, line.slope + half)
