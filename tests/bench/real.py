"""What the daemon costs a real engine: time to ready, the first request after it, throughput."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

from supervisord.engine.probe import EngineProbe
from tests.bench import real_engine, real_figures
from tests.bench.processes import cpu_percent, cpu_s
from tests.bench.real_engine import Build
from tests.bench.report import Table, quantile, spread
from tests.daemon.harness import Daemon
from tests.sim.engine import free_port, wait_until
from tests.sim.engine import http as ask

POLL_S = 5
PROMPT_TOKENS, ANSWER_TOKENS = 128, 32
SETTLED = 30
LATER, LATER_AFTER_S = 5, 1.0
"""Later clients, each with a connection of its own, and the rest before each."""
LOOKS = 200
STREAMS = 4
WINDOW_PROMPTS, WINDOW_ANSWERS = (16, 64), (64, 128)
SETTLE_S = 3.0
EVERY_S = 0.01
"""How often it is looked whether an engine answers; the same for ours and for a bare one."""

ORDER = ("with", "without", "without", "with")


class Size(NamedTuple):
    """How much is measured."""

    starts: int
    """Of each kind."""
    blocks: int
    """Of four windows, which are two pairs."""
    window_s: float = 20


class Requests(NamedTuple):
    """Completions of one start: the same length, never the same words."""

    first: real_engine.Answer
    """The very first request of a client."""
    settled: tuple[real_engine.Answer, ...]
    """So many after it, on the same connection."""
    later: tuple[real_engine.Answer, ...]
    """Of other clients, each after a rest: what a first request costs when nothing is left to warm up."""


class Start(NamedTuple):
    """One start, in seconds. Of a bare engine only what it has: its start, and its first completions."""

    engine_s: float  # started to /health 200
    requests: Requests
    spawn_s: float = 0.0  # daemon started to engine started
    noticed_s: float = 0.0  # /health 200 to the daemon's knowing it
    warmup_s: float = 0.0
    said_s: float = 0.0  # ready decided to the status document's saying so

    @property
    def ready_s(self) -> float:
        """Engine started to ready."""
        return self.engine_s + self.noticed_s + self.warmup_s + self.said_s


class Window(NamedTuple):
    """One window, with or without the daemon."""

    kind: str
    tokens_per_s: float
    daemon_percent: float
    """CPU of the daemon, in percent of a core."""


def tables(options: argparse.Namespace) -> list[Table]:
    """All parts."""
    build = real_engine.build(options.vllm, options.model, gpu=options.gpu)
    size = size_of(options)
    with real_engine.ended_by_signals():
        ours, bare = starts(build, size.starts)
        measured, look_s = windows(build, size.blocks, size.window_s)
    return [start_table(ours, bare), first_table(ours, bare), throughput_table(measured, size.window_s, look_s)]


def size_of(options: argparse.Namespace) -> Size:
    """More on a GPU, where all of it takes less time."""
    if options.quick:
        return Size(starts=1, blocks=2, window_s=5)
    return Size(starts=5, blocks=6) if options.gpu else Size(starts=3, blocks=4)


def starts(build: Build, count: int) -> tuple[list[Start], list[Start]]:
    """Ours and bare ones, one after the other in turn."""
    ours, bare = [], []
    for number in range(count):
        print(f"real: starts, {number + 1} of {count}", flush=True)
        bare.append(bare_start(build))
        ours.append(our_start(build))
    return ours, bare


def bare_start(build: Build) -> Start:
    """`vllm serve` by itself."""
    port = free_port()
    with tempfile.TemporaryFile() as log:
        began = time.time()
        with _session(real_engine.argv(build, port), real_engine.bare_environment(build), log.fileno()) as process:
            wait_until(lambda: answers(port) or process.poll() is not None, real_engine.READY_S, "/health", EVERY_S)
            healthy = time.time()
            assert process.poll() is None, f"vllm serve ended with {process.returncode}"
            return Start(healthy - began, first_and_settled(port))


def our_start(build: Build) -> Start:
    """The same by the daemon, as configured by default. Its records say when it did what."""
    port = free_port()
    with Daemon(real_engine.section(build, port), poll_interval_s=POLL_S) as daemon:
        began = time.time()
        daemon.start_as(wait=False)
        wait_until(lambda: answers(port), real_engine.READY_S, "/health", EVERY_S)
        healthy = time.time()
        daemon.wait_state("a", "ready", real_engine.READY_S)
        said = time.time()
        requests = first_and_settled(port)
        spawned, answering, ready = (_at(daemon.wait_event(kind)) for kind in ("spawned", "answering", "ready"))
        # Whoever of us two looked first saw it first: less than no time is none.
        noticed = max(answering, healthy)
        return Start(
            healthy - spawned, requests, spawned - began, noticed - healthy, ready - noticed, max(0.0, said - ready)
        )


def first_and_settled(port: int) -> Requests:
    """The first client of an engine, and a few after it."""
    rng = random.Random(port)

    def complete(count: int) -> list[real_engine.Answer]:
        with contextlib.closing(real_engine.Client(port)) as client:
            return [
                client.complete([rng.randrange(10, 500) for _ in range(PROMPT_TOKENS)], ANSWER_TOKENS)
                for _ in range(count)
            ]

    first, *settled = complete(1 + SETTLED)
    later = []
    for _ in range(LATER):
        time.sleep(LATER_AFTER_S)
        later += complete(1)
    return Requests(first, tuple(settled), tuple(later))


def windows(build: Build, blocks: int, window_s: float) -> tuple[list[Window], float]:
    """One engine under a steady load, while the daemon is there and not there in turn (ABBA, so that drift cancels).

    Without it: it is killed, and the engine goes on. With it: it is started again, and adopts the engine. Also what a
    look at the engine takes from it, in seconds of CPU.
    """
    port = free_port()
    found = []
    with Daemon(real_engine.section(build, port), poll_interval_s=POLL_S) as daemon:
        daemon.start()
        ready = daemon.wait_state("a", "ready", real_engine.READY_S)
        with real_engine.load(port, STREAMS, WINDOW_PROMPTS, WINDOW_ANSWERS) as load:
            load.streams = STREAMS
            time.sleep(2 * SETTLE_S)
            there = True
            for number, kind in enumerate(ORDER * blocks):
                if there and kind == "without":
                    daemon.kill()
                elif not there and kind == "with":
                    daemon.start()
                    adopted = daemon.wait_state("a", "ready")
                    assert (adopted["pid"], adopted["generation"]) == (ready["pid"], 1), adopted
                there = kind == "with"
                time.sleep(SETTLE_S)
                found.append(window(kind, port, [daemon.pid] if there else [], window_s))
                print(f"real: window {number + 1} of {4 * blocks}, {found[-1]}", flush=True)
        assert load.failures == [], load.failures
        return found, taken_by_a_look_s(port, ready["pid"])


def window(kind: str, port: int, daemon: list[int], window_s: float) -> Window:
    """Tokens by the engine's own counter, so that no request under way is lost."""
    before, began = _generated(port), time.monotonic()
    percent, _ = cpu_percent(lambda: daemon, window_s)
    after, ended = _generated(port), time.monotonic()
    return Window(kind, (after - before) / (ended - began), percent)


def taken_by_a_look_s(port: int, pid: int) -> float:
    """CPU of an idle engine's API server for one look: GET /health and /metrics over a new connection."""
    with contextlib.closing(EngineProbe("127.0.0.1", port, 30)) as probe:
        probe.look(0.0, None)  # which asks for the version too
        before = sum(cpu_s([pid], lambda *_: "all").values())
        for _ in range(LOOKS):
            probe.close()
            assert probe.look(0.0, None).metrics_ok
        return (sum(cpu_s([pid], lambda *_: "all").values()) - before) / LOOKS


def start_table(ours: Sequence[Start], bare: Sequence[Start]) -> Table:
    """Where the time of a start goes."""

    def row(name: str, mine: Sequence[float], others: Sequence[float] = ()) -> tuple[str, str, str]:
        return (name, spread(mine, "s", 2), spread(others, "s", 2) if others else "")

    added = [1000 * (start.noticed_s + start.said_s) for start in ours]
    rows = (
        ("daemon started to engine started", spread([1000 * start.spawn_s for start in ours], "ms", 0), ""),
        row("engine started to /health 200", [s.engine_s for s in ours], [s.engine_s for s in bare]),
        ("/health 200 to noticed by the daemon", spread([1000 * start.noticed_s for start in ours], "ms", 0), ""),
        row("warm-up", [s.warmup_s for s in ours]),
        ("ready to said by `status`", spread([1000 * start.said_s for start in ours], "ms", 0), ""),
        row("engine started to ready (bare: to /health 200)", [s.ready_s for s in ours], [s.engine_s for s in bare]),
        row(
            "engine started to first completion answered",
            [s.ready_s + s.requests.first.total_s for s in ours],
            [s.engine_s + s.requests.first.total_s for s in bare],
        ),
        ("added by supervision after /health 200, without the warm-up", spread(added, "ms", 0), ""),
    )
    notes = (
        f"`vllm serve` with the same flags, bare and ours in turn; /health is asked every {1000 * EVERY_S:.0f} ms.",
        "Ours adds the flags --shutdown-timeout and --disable-access-log-for-endpoints.",
        "Differences between the two starts up to /health 200 are noise of the machine as long as the ranges overlap.",
    )
    return Table("Start to ready", ("", "ours", "bare `vllm serve`"), rows, notes)


def first_table(ours: Sequence[Start], bare: Sequence[Start]) -> Table:
    """The first request against the settled ones of the same start."""

    def row(name: str, value: Callable[[real_engine.Answer], float], group: Sequence[Start]) -> tuple[str, ...]:
        requests = [start.requests for start in group]
        firsts = [1000 * value(one.first) for one in requests]
        later, settled = (
            [statistics.median(1000 * value(answer) for answer in answers) for answers in many]
            for many in ([one.later for one in requests], [one.settled for one in requests])
        )
        slow = [quantile([1000 * value(answer) for answer in one.settled], 0.9) for one in requests]
        noise = [a / b for a, b in zip(slow, settled, strict=True)]
        return (
            name,
            spread(firsts, "ms"),
            spread(later, "ms"),
            spread(settled, "ms"),
            ratio(firsts, later),
            ratio(firsts, settled),
            f"{statistics.median(noise):.2f}",
        )

    def ratio(firsts: Sequence[float], others: Sequence[float]) -> str:
        found = [a / b for a, b in zip(firsts, others, strict=True)]
        return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"

    groups = (("ours, after READY", ours), ("bare, after /health 200", bare))
    values: tuple[tuple[str, Callable[[real_engine.Answer], float]], ...] = (
        ("time to first token", lambda answer: answer.first_s),
        ("whole answer", lambda answer: answer.total_s),
    )
    rows = tuple(row(f"{who}: {what}", value, group) for what, value in values for who, group in groups)
    header = (
        "",
        "first request",
        "first of a later client (median of a start)",
        "settled (median of a start)",
        "first / first of a later client",
        "first / settled",
        "settled p90 / settled",
    )
    lengths = (
        f"{PROMPT_TOKENS} tokens of prompt and {ANSWER_TOKENS} of answer, one request at a time on one connection;"
        f" settled: the {SETTLED} after the first."
    )
    chance = (
        "Last column: one settled request in ten exceeds this; a ratio of one request below it is no sign of anything."
    )
    connection = (
        f"The first request has to connect, and comes after a rest, as that of any client: {LATER} later ones come"
        f" {LATER_AFTER_S:g} s apart with a connection each. What the warm-up left to do is the first over these."
    )
    notes = (lengths, connection, chance)
    return Table("First request after READY", header, rows, notes)


def throughput_table(measured: Sequence[Window], window_s: float, look_s: float) -> Table:
    """Tokens per second with and without the daemon, and an estimate of what it takes by CPU times."""
    pairs = []
    for one, other in zip(measured[::2], measured[1::2], strict=True):
        by_kind = {window.kind: window.tokens_per_s for window in (one, other)}
        pairs.append((by_kind["with"], by_kind["without"]))
    found = real_figures.ratio(pairs)
    daemon = statistics.fmean(window.daemon_percent for window in measured if window.kind == "with")
    looks = look_s / POLL_S * 100
    rows = (
        ("with the daemon", spread([a for a, _ in pairs], "tokens/s", 0)),
        ("without", spread([b for _, b in pairs], "tokens/s", 0)),
        ("with / without (95 % CI)", f"{found.value:.4f} ({found.low:.4f} to {found.high:.4f}, {len(pairs)} pairs)"),
        ("CPU of the daemon in the windows with it", f"{daemon:.3f} % of a core"),
        ("CPU of the API server for our looks", f"{look_s * 1000:.2f} ms each, {looks:.3f} % of a core"),
        ("estimated loss of one busy core", f"{daemon + looks:.3f} %"),
    )
    order = (
        f"One engine all the time, {STREAMS} streams of completions; windows of {window_s:g} s in the order"
        f" {', '.join(ORDER)}. Without: the daemon is killed, the engine goes on; with: it is started and adopts it."
    )
    ratios = (
        f"The daemon polls every {POLL_S} s. Geometric mean of the ratios of neighbouring windows, Student's t on their"
        " logarithms; tokens are those of the engine's own counter."
    )
    estimate = (
        f"The last row is an estimate, the sum of the two before it: CPU times of the daemon, and of the API server for"
        f" looks (the mean of {LOOKS} at the idle engine). What caches, memory bandwidth and pauses of the engine's"
        " event loop cost is not in it."
    )
    notes = (order, ratios, estimate)
    return Table("Throughput", ("", "seen"), rows, notes)


def answers(port: int) -> bool:
    """Whether /health says 200."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        return ask("GET", f"http://127.0.0.1:{port}/health", timeout_s=5).status == http.HTTPStatus.OK
    return False


def _generated(port: int) -> float:
    text = ask("GET", f"http://127.0.0.1:{port}/metrics", timeout_s=30).text
    lines = [line for line in text.splitlines() if line.startswith("vllm:generation_tokens_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def _at(event: dict[str, str]) -> float:
    return datetime.fromisoformat(event["timestamp"].replace("Z", "+00:00")).timestamp()


@contextlib.contextmanager
def _session(command: Sequence[str], environment: dict[str, str], output: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process and all that it starts, none of which is left."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
