"""How inputs are made, how many, and what every target has to keep: no surprise, bounded time, bounded memory.

`FUZZ_EXAMPLES=20000 pytest tests/fuzz` tries other inputs each time (those of an earlier time with its FUZZ_SEED);
without it a few are tried, always the same.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import re
import signal
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from time import process_time, thread_time
from typing import Any, Final, NoReturn

DATA: Final = Path(__file__).parents[1] / "data"
EXAMPLES: Final = int(os.environ.get("FUZZ_EXAMPLES", "0"))
SEED: Final = os.environ.get("FUZZ_SEED") or (str(random.SystemRandom().getrandbits(32)) if EXAMPLES else "0")

TRIED: Final[dict[str, list[float]]] = defaultdict(lambda: [0, 0, 0.0, 0.0, 0])
"""By target: inputs, bytes, seconds of CPU, the longest of them, the most KiB of memory that one of them added.

What conftest.py tells at the end.
"""

_LONGEST_BYTES: Final = 150_000
"""Of what is made by mutation: it fits into the buffer of a socket."""
_START_S: Final = 0.25
_BYTE_S: Final = 20e-6
"""CPU that an input may take, and for each of its bytes: some twenty times what the slowest target needs."""
_WAIT_S: Final = 20.0
"""By the clock an input may take that much more than CPU: machines are busy."""
_ADDED_KIB: Final = 64 << 10
"""That an input may add to this process's memory while it is read."""
_COSTS_S: Final = 120.0
"""By the clock, for a call of `costs`: the second one, which is traced, takes some five times the first."""

NASTY: Final = (
    "", " ", "\t", "\x00", "\x1b[2J", "\x1b]0;x", "\x7f", "\x85", "\u2028", "\u202e", "\ufeff", "\ud800",
    "\U0001f600", "Z" + "\u0335" * 9,
    "\u00b2", "\u0663", "\u0130", "0", "-0", "-1", "1e999", "-1e999", "nan", "NaN", "inf", "Infinity", "1e308",
    "1_0", "0x10", "1.", ".5", "1e", "9" * 19,
    "9" * 400, "9" * 5000, "2147483648", "4294967296", "9223372036854775808", "18446744073709551616", "true",
    "null", "{", "}", "[", "]",
    "[" * 3000, '{"a":' * 1500, '"', "'", '"""', "\\", "\\u0000", "\\ud800", "%", "%00", "%zz", "%s", "{0}", "{x}",
    "$", ";", ":", ",", "=", "==",
    "\n", "\r", "\r\n", "\r\n\r\n", "\n\n", "../..", "/", "//", "a" * 300, "a" * 4000, ".", "..", "a." * 40, "-",
    "--", "#", "&", "?", "@", "://",
)  # fmt: skip
_FINITE: Final = (0, -1, 1, 0.5, 1e-320, 2**31, 2**53, 2**63, 2**64, 10**30, 1.7e308, -1.7e308)
"""Numbers that JSON of the daemon can hold: it has no word for NaN."""
NUMBERS: Final = (
    0, -0.0, 1, -1, 0.5, 1e-320, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**30,
    10**400, 1e15, 1e18,
    1.7e308, -1.7e308, float("nan"), float("inf"), -float("inf"),
)  # fmt: skip


def fuzz(short: int, slow: int = 1) -> Callable[[Callable[[random.Random], None]], Callable[[], None]]:
    """A test that is called that often, each time with another source of chance.

    FUZZ_EXAMPLES: so often instead; one that is `slow` times as slow as others, so many times less often.
    """

    def wrap(test: Callable[[random.Random], None]) -> Callable[[], None]:
        def tries() -> None:
            for number in range(-(-EXAMPLES // slow) or short):
                test(random.Random(f"{SEED} {test.__name__} {number}"))

        tries.__doc__ = test.__doc__
        return tries

    return wrap


class _HangError(BaseException):
    """Nothing that is tried catches it."""


@contextmanager
def bounded(
    target: str, data: object, per_byte_s: float = _BYTE_S, start_s: float = _START_S, wait_s: float = _WAIT_S
) -> Iterator[None]:
    """Count an input, and fail if it takes more time or memory than it may. Its text is shown when anything fails.

    CPU is that of all threads and of children that ended. Memory is this process's alone, and what its allocator kept
    from before is not seen again.
    """
    size = len(data) if isinstance(data, str | bytes) else len(repr(data))
    may_take_s = start_s + size * per_byte_s
    _forget_peak()
    before_kib = peak_kib()
    begun = _cpu_s()
    try:
        with _no_hang(may_take_s + wait_s):
            yield
    except (Exception, _HangError) as error:
        raise AssertionError(f"{target}: {type(error).__name__}: {error}\ninput: {str(data)[:20000]!r}") from error
    took_s = _cpu_s() - begun
    added_kib = peak_kib() - before_kib
    tried = TRIED[target]
    tried[0] += 1
    tried[1] += size
    tried[2] += took_s
    tried[3] = max(tried[3], took_s)
    tried[4] = max(tried[4], added_kib)
    seen = f"{target}: {took_s:.2f} s of CPU, {added_kib >> 10} MiB for {size} bytes: {str(data)[:20000]!r}"
    assert took_s < may_take_s, seen
    assert added_kib < _ADDED_KIB, seen


@contextmanager
def _no_hang(after_s: float) -> Iterator[None]:
    """Break off what takes longer by the clock, in locks and sockets too, and write where each thread stood."""

    def hang(*_: object) -> NoReturn:
        faulthandler.dump_traceback(2)
        raise _HangError(f"no end after {after_s:.1f} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _forget_peak() -> None:
    """From now on the peak of this process's memory counts from what there is."""
    Path("/proc/self/clear_refs").write_bytes(b"5")


def peak_kib(pid: int | str = "self") -> int:
    """The most memory that a process had."""
    status = Path(f"/proc/{pid}/status").read_bytes()
    return int(status.partition(b"VmHWM:")[2].split(maxsplit=1)[0])


def _cpu_s() -> float:
    """Of this process and of its children that ended."""
    children = getrusage(RUSAGE_CHILDREN)
    return process_time() + children.ru_utime + children.ru_stime


def costs(call: Callable[[], object]) -> tuple[float, int]:
    """Seconds of CPU, and then, once more, the peak of bytes that a call takes."""
    with _no_hang(_COSTS_S):
        begun = thread_time()
        call()
        took_s = thread_time() - begun
        tracemalloc.start()
        try:
            call()
            return took_s, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


def pumped(parts: Sequence[bytes], size: int) -> list[bytes]:
    """Each part, over and over, and each pair of parts: `a b b b b` and `a b a b`."""
    found = {part * (size // len(part)) for part in parts}
    found |= {one + two * (size // len(two)) for one in parts for two in parts if one != two}
    return sorted(found)


# --- mutation ---------------------------------------------------------------------------------------------------------


def mutated(seeds: Sequence[bytes], rng: random.Random) -> bytes:
    """One of the seeds with a few changes, often of lines and of numbers."""
    data = rng.choice(seeds)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 5, 9))):
        data = rng.choice(_CHANGES)(data, rng, seeds)
    return data[:_LONGEST_BYTES]


def texts(seeds: Sequence[str], rng: random.Random) -> str:
    """The same for text; lone surrogates in it come back as they were."""
    data = [text.encode("utf-8", "surrogatepass") for text in seeds]
    return mutated(data, rng).decode("utf-8", "replace")


def nasty(rng: random.Random) -> bytes:
    """A short piece that parsers stumble over."""
    return rng.choice(NASTY).encode("utf-8", "surrogatepass")


_DIGITS: Final = re.compile(rb"[0-9]+")


def _cut(data: bytes, rng: random.Random) -> tuple[int, int]:
    start = rng.randint(0, len(data))
    return start, min(len(data), start + int(rng.paretovariate(0.6)))


def _drop(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    start, end = _cut(data, rng)
    return data[:start] + data[end:]


def _end(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    return data[: rng.randint(0, len(data))]


def _insert(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + nasty(rng) + data[at:]


def _replace(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    start, end = _cut(data, rng)
    return data[:start] + nasty(rng) + data[end:]


def _flip(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    if not data:
        return data
    at = rng.randrange(len(data))
    return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]


def _repeat(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    start, end = _cut(data, rng)
    piece = data[start:end]
    return data[:start] + piece * min(rng.choice((2, 3, 100, 3000)), 1 + 20_000 // (len(piece) or 1)) + data[end:]


def _splice(data: bytes, rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    other = rng.choice(seeds)
    return data[: rng.randint(0, len(data))] + other[rng.randint(0, len(other)) :]


def _number(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    """Another number in the place of one that is there."""
    found = list(_DIGITS.finditer(data))
    if not found:
        return data
    at, end = rng.choice(found).span()
    return data[:at] + str(rng.choice(NUMBERS)).encode() + data[end:]


def _lines(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    """Lines doubled, dropped or in another order."""
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    match rng.randrange(4):
        case 0:
            del lines[at]
        case 1:
            lines.insert(rng.randint(0, len(lines)), lines[at])
        case 2:
            lines[at] *= rng.choice((2, 50))
        case _:
            other = rng.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
    return b"\n".join(lines)


_CHANGES: Final = (_drop, _end, _insert, _insert, _replace, _flip, _repeat, _splice, _number, _number, _lines, _lines)


def mutated_json(value: Any, rng: random.Random, changes: int | None = None) -> Any:
    """A JSON value with a few of its parts replaced, dropped, doubled or renamed."""
    value = deepcopy(value)
    for _ in range(rng.choice((1, 1, 2, 3, 6)) if changes is None else changes):
        places = list(_places(value))
        if not places:
            return any_json(rng)
        holder, key = rng.choice(places)
        match rng.randrange(6):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[rng.choice(NASTY)] = holder.pop(key)
            case 2 if isinstance(holder, list):
                holder.extend([holder[key]] * rng.choice((1, 2, 40)))
            case 3:
                holder[key] = deepcopy(_got(rng.choice(places)))
            case _:
                holder[key] = any_json(rng)
    return value


def same_kinds(document: Any, rng: random.Random) -> Any:
    """The same document with other values of the same kinds, some of them unknown."""
    if isinstance(document, dict):
        return {key: same_kinds(value, rng) for key, value in document.items()}
    if isinstance(document, list):
        kept = [same_kinds(value, rng) for value in document]
        return kept * rng.choice((0, 1, 1, 1, 3)) if rng.random() < 0.2 else kept
    if rng.random() > 0.1:
        return document
    if isinstance(document, bool):
        return not document
    if isinstance(document, int | float):
        return rng.choice((*_FINITE, None))
    if isinstance(document, str) and not document[:4].isdigit():
        return rng.choice((*NASTY, None))
    return document


def any_json(rng: random.Random, depth: int = 2) -> Any:
    """Some JSON value, mostly of a kind that nobody expects."""
    match rng.randrange(8):
        case 0:
            return rng.choice((None, True, False))
        case 1 | 2 | 3:
            return rng.choice(NUMBERS)
        case 4 if depth:
            return [any_json(rng, depth - 1) for _ in range(rng.randrange(4))]
        case 5 if depth:
            return {rng.choice(NASTY): any_json(rng, depth - 1) for _ in range(rng.randrange(4))}
        case _:
            return rng.choice(NASTY)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)


def _got(place: tuple[Any, Any]) -> Any:
    return place[0][place[1]]


def json_bytes(seeds: Sequence[Any], rng: random.Random) -> bytes:
    """JSON of a changed value; now and then its text is changed too."""
    try:
        data = json.dumps(mutated_json(rng.choice(seeds), rng)).encode()
    except ValueError:  # an integer of too many digits to be written
        data = b"9" * 5000
    return mutated([data], rng) if rng.random() < 0.3 else data
