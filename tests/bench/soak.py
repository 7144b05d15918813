"""An hour of a real engine under load: is the daemon flat, and does it leave a healthy engine alone?

Samples go to a folder while they are taken (SOAK_FOLDER in the environment, otherwise a new one), so that a run that is
cut short can still be summed up: `report(folder)`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from supervisord.control import client
from tests.bench import polls, real_engine, real_figures, real_proc
from tests.bench.report import Table, quantile
from tests.bench.scraping import SCRAPE_S, scraped
from tests.daemon.harness import Daemon
from tests.daemon.sims import table
from tests.sim.engine import free_port, title_of

Document = dict[str, Any]

SAMPLE_S = 10
WINDOW_S = 600
"""One cycle of the load: the first and the last of them have seen the same."""

CYCLE: tuple[tuple[int, float], ...] = ((1, 120), (4, 120), (8, 120), (24, 60), (0, 90), (4, 90))
"""Streams and seconds. 24 are three times what the engine runs at once; without any, canaries are due after 60 s."""

PROMPT_TOKENS, ANSWER_TOKENS = (8, 400), (8, 300)
FLAT_KIB_H = 1024
"""Memory is flat if the whole confidence interval of its slope is below this."""

_FEWEST = 5
"""Samples of a window that has a slope."""

STATUS_S = 60.0
_ACTS = ("verdict", "killing", "exited", "restart", "failed", "stopping", "spawned")


def tables(options: argparse.Namespace) -> list[Table]:
    """Run for `options.minutes` after the engine is ready, and sum it up."""
    if options.minutes < 1:
        raise SystemExit(f"cannot soak for {options.minutes:g} min: a slope needs samples; say at least 1")
    named = os.environ.get("SOAK_FOLDER")
    folder = Path(named) if named else Path(tempfile.mkdtemp(prefix="vllm-supervisor-soak."))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"soak: samples go to {folder}", flush=True)
    with real_engine.ended_by_signals():
        measure(folder, options.minutes, real_engine.build(options.vllm, options.model, gpu=False))
    return [*report(folder), polls.table(options.minutes / 4)]


def measure(folder: Path, minutes: float, build: real_engine.Build) -> None:
    """Write run.json, samples.jsonl, events.jsonl, failures.txt and daemon.log."""
    for name in ("samples.jsonl", "events.jsonl"):
        (folder / name).unlink(missing_ok=True)
    port, listen = free_port(), free_port()
    shorter = min(1.0, minutes / 30)
    toml = real_engine.section(build, port, "nice", "-n", "5")
    toml += table("notify.nobody", {"url": f"https://127.0.0.1:{free_port()}/hook", "events": ["all"]})
    with Daemon(toml, poll_interval_s=5, listen=f"127.0.0.1:{listen}") as daemon, _kept(daemon, folder):
        daemon.start()
        began = time.monotonic()
        daemon.wait_state("a", "ready", real_engine.READY_S)
        run = {"minutes": minutes, "window_s": WINDOW_S * shorter, "ready_s": round(time.monotonic() - began, 1)}
        (folder / "run.json").write_text(json.dumps(run), encoding="utf-8")
        with (
            real_engine.load(port, max(n for n, _ in CYCLE), PROMPT_TOKENS, ANSWER_TOKENS) as load,
            scraped(listen) as scrapes,
        ):
            Sampler(daemon, load, scrapes, folder).run(minutes * 60, shorter)


class Sampler:
    """Looks at the daemon every 10 s, and sets how many streams there are."""

    def __init__(self, daemon: Daemon, load: real_engine.Load, scrapes: Counter[str], folder: Path) -> None:
        self._daemon, self._load, self._scrapes, self._folder = daemon, load, scrapes, folder
        self._last_id = 0

    def run(self, duration_s: float, shorter: float) -> None:
        """Until the time is over."""
        began = time.monotonic()
        sample_at, minute = 0.0, 0
        while (at := time.monotonic() - began) < duration_s:
            self._load.streams = streams_at(at / shorter)
            if at >= sample_at:
                sample_at = at - at % SAMPLE_S + SAMPLE_S
                sample = self._sample(at)
                _append(self._folder / "samples.jsonl", [sample])
                if at >= minute * 60:
                    minute = int(at / 60) + 1
                    self._keep_events()
                    print(_line(sample), flush=True)
            time.sleep(0.2)
        self._load.streams = 0
        _append(self._folder / "samples.jsonl", [self._sample(duration_s)])
        self._keep_events()

    def _sample(self, at: float) -> Document:
        own = real_proc.process(self._daemon.pid)  # before it has our connection
        probes = []
        with contextlib.suppress(OSError):  # a probe or a thread that ends just now
            probes = [
                real_proc.process(child)
                for child in real_proc.children(self._daemon.pid)
                if "gpu/helper.py" in title_of(child)
            ]
        began = time.monotonic()
        try:
            engine, problem = self._daemon.engine("a"), ""
        except client.ControlError as error:
            engine, problem = {}, str(error)
        status_ms = (time.monotonic() - began) * 1000
        return {
            "at_s": round(at, 1),
            "streams": self._load.streams,
            **own,
            "probes": probes,
            "files_bytes": real_proc.files(self._daemon.state_dir),
            "engine": {key: engine.get(key) for key in ("state", "generation", "pid", "restarts", "health")},
            "reasons": [reason["code"] for reason in engine.get("reasons", [])],
            "problem": problem,
            "status_ms": round(status_ms, 2),
            "requests": dict(self._load.done),
            "scrapes": dict(self._scrapes),
            "load": os.getloadavg()[0],
            "processes": sum(1 for entry in Path("/proc").iterdir() if entry.name.isdigit()),
            "shm_files": sum(1 for _ in Path("/dev/shm").iterdir()),
        }

    def _keep_events(self) -> None:
        """What the history has got since the last time (nothing if the daemon does not answer now), and what failed."""
        with contextlib.suppress(client.ControlError):
            more = True
            while more:
                target = f"/v1/events?after={self._last_id}&limit=500"
                page = client.get(str(self._daemon.socket), target, STATUS_S).document()
                _append(self._folder / "events.jsonl", page["events"])
                self._last_id, more = page["last_id"], page["more"]
        (self._folder / "failures.txt").write_text("\n".join(self._load.failures), encoding="utf-8")


def streams_at(at_s: float) -> int:
    """How many streams the cycle has at a time since its beginning."""
    at_s %= WINDOW_S
    for streams, lasts_s in CYCLE:
        at_s -= lasts_s
        if at_s < 0:
            return streams
    raise AssertionError("the cycle is shorter than the window")


def report(folder: Path) -> list[Table]:
    """The tables of a run, also of one that was cut short."""
    run: Document = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    samples = _lines(folder / "samples.jsonl")
    events = _lines(folder / "events.jsonl")
    first = [s for s in samples if s["at_s"] <= run["window_s"]]
    last = [s for s in samples if s["at_s"] >= samples[-1]["at_s"] - run["window_s"]]
    after = [s for s in samples if s["at_s"] >= run["window_s"]]
    half = [s for s in samples if s["at_s"] >= samples[-1]["at_s"] / 2]
    window = f"{run['window_s'] / 60:.2g} min"
    slopes = (f"slope after the first {window}, KiB/h (95 % CI)", "in the second half")
    header = ("", f"first {window}", f"last {window}", *slopes)
    rows = [
        *(_memory_row(name, key, first, last, (after, half)) for name, key in _MEMORY),
        *(_count_row(name, first, last) for name in _COUNTS),
        ("processor, % of a core", f"{_cpu(first):.2f}", f"{_cpu(last):.2f}", "", ""),
        ("history on disk, MiB", _history_mib(first[-1]), _history_mib(last[-1]), "", ""),
        ("status document, ms (p50 / p99)", _status_ms(first), _status_ms(last), "", ""),
        _probe_row(first, last),
    ]
    flat = Table("The daemon", header, tuple(rows), _notes(run, samples))
    return [
        flat,
        _by_window(samples, run["window_s"]),
        Table("The engine, and what was told of it", ("", "seen"), _engine_rows(samples, events, first, last, after)),
    ]


_MEMORY = (
    ("resident (VmRSS), MiB", "rss_kib"),
    ("proportional (PSS), MiB", "pss_kib"),
    ("anonymous, MiB", "anonymous_kib"),
)
_COUNTS = ("descriptors", "threads")


def verdict(first: Sequence[Document], last: Sequence[Document], after: Sequence[Document]) -> str:
    """Flat or not, and by which limit."""
    trend = memory_slope(after, "anonymous_kib")
    grown = []
    if trend.high >= FLAT_KIB_H:
        grown.append(f"anonymous memory grows by {trend.value:.0f} KiB/h (up to {trend.high:.0f})")
    for name in _COUNTS:
        before, now = (statistics.median(s[name] for s in part) for part in (first, last))
        if now > before:
            grown.append(f"{name} went from {before:g} to {now:g}")
    limits = (
        f"anonymous memory below {FLAT_KIB_H} KiB/h with 95 % confidence, no more descriptors and threads than at first"
    )
    return f"{'not flat: ' + '; '.join(grown) if grown else 'flat'} (limit: {limits})"


def memory_slope(samples: Sequence[Document], key: str) -> real_figures.Interval:
    """KiB per hour."""
    return real_figures.slope([s["at_s"] / 3600 for s in samples], [s[key] for s in samples])


def _by_window(samples: Sequence[Document], window_s: float) -> Table:
    """Growth that fades is seen by its slope in one window after the other."""
    rows = []
    begin = 0.0
    while begin < samples[-1]["at_s"]:
        end = min(begin + window_s, samples[-1]["at_s"])
        inside = [s for s in samples if begin <= s["at_s"] <= end]
        if len(inside) >= _FEWEST:
            trend = memory_slope(inside, "anonymous_kib")
            per_window = (f"{value * window_s / 3600:+.0f}" for value in trend)
            minutes = f"{begin / 60:.3g} to {end / 60:.3g}"
            rows.append((minutes, "{} ({} to {})".format(*per_window), f"{trend.value:+.0f}"))
        begin += window_s
    header = ("minutes", f"slope, KiB in {window_s / 60:.2g} min (95 % CI)", "KiB/h")
    return Table("Anonymous memory, window by window", header, tuple(rows))


def _engine_rows(
    samples: Sequence[Document],
    events: Sequence[Document],
    first: Sequence[Document],
    last: Sequence[Document],
    after: Sequence[Document],
) -> tuple[tuple[str, str], ...]:
    known = [s["engine"] for s in samples if s["engine"]["state"]]
    pids, generations = ({engine[key] for engine in known} for key in ("pid", "generation"))
    kinds = Counter(event["kind"] for event in events)
    bad = Counter(event["kind"] for event in events if event["severity"] in {"warning", "error", "critical"})
    looks = Counter(code for s in samples for code in s["reasons"])
    done = samples[-1]["requests"]
    unanswered = sum(bool(s["problem"]) for s in samples)
    return (
        ("verdict", verdict(first, last, after)),
        ("false restarts", f"{max(generations) - 1} (generations {_few(generations)}, pids {_few(pids)})"),
        ("acts on the engine in the history", _counts({kind: kinds[kind] for kind in _ACTS if kinds[kind]})),
        ("warnings and worse in the history", _counts(bad)),
        ("all events in the history", _counts(kinds)),
        ("reasons shown by status, looks", f"{_counts(looks)} of {len(samples)}"),
        ("requests answered whole", f"{done.get('ok', 0)} ({done.get('tokens', 0)} tokens)"),
        ("requests failed", str(done.get("failed", 0))),
        ("status not answered", f"{unanswered} of {len(samples)}"),
        ("scrapes of /metrics", _counts(samples[-1]["scrapes"])),
    )


def _notes(run: Document, samples: Sequence[Document]) -> tuple[str, ...]:
    loads, processes, shm_files = ([s[key] for s in samples] for key in ("load", "processes", "shm_files"))
    cycle = ", ".join(f"{streams} for {lasts_s * run['window_s'] / WINDOW_S:.0f} s" for streams, lasts_s in CYCLE)
    length = (
        f"{samples[-1]['at_s'] / 60:.0f} of {run['minutes']:g} min after the engine was ready, which took"
        f" {run['ready_s']:.0f} s; {len(samples)} samples. Load average of the machine"
        f" {min(loads):.1f} to {max(loads):.1f}, median {statistics.median(loads):.1f}."
    )
    load = (
        f"Load: streams of completions, {cycle}, and again; prompts of {PROMPT_TOKENS[0]} to {PROMPT_TOKENS[1]} tokens,"
        f" answers of {ANSWER_TOKENS[0]} to {ANSWER_TOKENS[1]}; the engine runs {real_engine.MAX_NUM_SEQS} at once"
        " (max-num-seqs). It has one computing thread and nice 5."
    )
    parts = (
        f"All parts of the daemon are on: polls every 5 s, canaries, history, /metrics scraped every {SCRAPE_S} s, the"
        f" status document asked for every {SAMPLE_S} s, and a webhook for all events whose receiver is not there."
    )
    others = (
        f"The daemon keeps the last list of all processes of the machine ({min(processes)} to {max(processes)} of them,"
        f" median {statistics.median(processes):g}) and of /dev/shm (from {shm_files[0]} to {shm_files[-1]} files)."
        " Where others fill them, its memory follows."
    )
    figures = "Medians of the window. The interval of the slope allows for the correlation of the samples."
    return (length, load, parts, others, figures)


def _memory_row(
    name: str, key: str, first: Sequence[Document], last: Sequence[Document], trends: Sequence[Sequence[Document]]
) -> tuple[str, ...]:
    mib = (f"{statistics.median(s[key] for s in part) / 1024:.2f}" for part in (first, last))
    slopes = (memory_slope(part, key) for part in trends)
    return (name, *mib, *(f"{trend.value:+.0f} ({trend.low:+.0f} to {trend.high:+.0f})" for trend in slopes))


def _count_row(name: str, first: Sequence[Document], last: Sequence[Document]) -> tuple[str, ...]:
    counts = ([s[name] for s in part] for part in (first, last))
    return (name, *(f"{statistics.median(part):g} ({min(part)} to {max(part)})" for part in counts), "", "")


def _probe_row(first: Sequence[Document], last: Sequence[Document]) -> tuple[str, ...]:
    def cell(part: Sequence[Document]) -> str:
        found = [probe["rss_kib"] for s in part for probe in s["probes"]]
        return f"{statistics.median(found) / 1024:.2f}" if found else "no such process (no GPU)"

    return ("process that reads the GPUs: resident, MiB", cell(first), cell(last), "", "")


def _cpu(samples: Sequence[Document]) -> float:
    spent_s = samples[-1]["cpu_s"] - samples[0]["cpu_s"]
    return float(100 * spent_s / (samples[-1]["at_s"] - samples[0]["at_s"]))


def _history_mib(sample: Document) -> str:
    return f"{sample['files_bytes']['history'] / 1024**2:.2f}"


def _status_ms(samples: Sequence[Document]) -> str:
    values = [s["status_ms"] for s in samples if not s["problem"]]
    return f"{quantile(values, 0.5):.1f} / {quantile(values, 0.99):.1f}"


def _counts(counted: dict[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in sorted(counted.items(), key=lambda item: -item[1])) or "none"


def _few(values: set[int]) -> str:
    return ", ".join(str(value) for value in sorted(values))


def _line(sample: Document) -> str:
    done = sample["requests"]
    return (
        f"soak: {sample['at_s'] / 60:.0f} min, {sample['streams']} streams; resident {sample['rss_kib']} KiB, anonymous"
        f" {sample['anonymous_kib']}, {sample['descriptors']} descriptors, {sample['threads']} threads; engine"
        f" {sample['engine']['state']} generation {sample['engine']['generation']}, {sample['reasons']};"
        f" {done.get('ok', 0)} ok, {done.get('failed', 0)} failed; load {sample['load']:.1f}"
    )


def _append(path: Path, documents: Sequence[Document]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(document) + "\n" for document in documents)


def _lines(path: Path) -> list[Document]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@contextlib.contextmanager
def _kept(daemon: Daemon, folder: Path) -> Iterator[None]:
    """The daemon's own words outlive its folder."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            shutil.copy(daemon.log, folder / "daemon.log")
