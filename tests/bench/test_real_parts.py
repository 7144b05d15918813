"""The arithmetic of the parts `real` and `soak`; that they run at all is seen by running them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.bench import real, real_figures, soak
from tests.bench.__main__ import parse
from tests.bench.real_engine import Answer
from tests.bench.report import Table


@pytest.mark.parametrize(("degrees", "table"), [(3, 3.182), (5, 2.571), (11, 2.201), (30, 2.042), (1000, 1.962)])
def test_quantiles_of_t_are_those_of_the_tables(degrees: int, table: float) -> None:
    assert real_figures.t_quantile(degrees) == pytest.approx(table, rel=0.01)


def test_a_ratio_of_pairs_does_not_see_what_both_of_a_pair_share() -> None:
    found = real_figures.ratio([(99.0 * scale, 100.0 * scale) for scale in (1, 2, 5, 0.1)])
    assert found == pytest.approx((0.99, 0.99, 0.99))


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    rng = random.Random(1)
    held = 0
    for _ in range(400):
        low, high = real_figures.ratio([(rng.lognormvariate(-0.01, 0.03), 1.0) for _ in range(12)])[1:]
        held += low <= 2.718281828**-0.01 <= high
    assert 0.92 <= held / 400 <= 0.98


def test_a_slope_is_found_through_noise_that_remembers() -> None:
    rng = random.Random(2)
    times = [at / 360 for at in range(300)]
    held = 0
    for _ in range(200):
        noise, values = 0.0, []
        for at in times:
            noise = 0.8 * noise + rng.gauss(0, 10)
            values.append(40_000 + 50 * at + noise)
        found = real_figures.slope(times, values)
        held += found.low <= 50 <= found.high
    assert held / 200 >= 0.9


def test_what_never_changes_has_no_slope() -> None:
    assert real_figures.slope([0, 1, 2, 3], [7, 7, 7, 7]) == (0, 0, 0)


def test_the_cycle_of_the_load_fills_a_window() -> None:
    assert sum(lasts_s for _, lasts_s in soak.CYCLE) == soak.WINDOW_S
    assert [soak.streams_at(at) for at in (0, 119.9, 120, 500, 599, 600, 3599)] == [1, 1, 4, 0, 4, 1, 4]


def sample(at_s: float, **changes: Any) -> soak.Document:
    return {
        "at_s": at_s,
        "streams": 4,
        "rss_kib": 51_200,
        "pss_kib": 40_960,
        "anonymous_kib": 30_720,
        "descriptors": 20,
        "threads": 12,
        "cpu_s": at_s / 100,
        "probes": [],
        "files_bytes": {"history": 1024**2, "logs": 10, "other": 10},
        "engine": {"state": "ready", "generation": 1, "pid": 77, "restarts": 0, "health": "ok"},
        "reasons": [],
        "problem": "",
        "status_ms": 3.0,
        "requests": {"ok": 5, "tokens": 99},
        "scrapes": {"ok": 2},
        "load": 1.5,
        "processes": 90,
        "shm_files": 3,
        **changes,
    }


def summed_up(folder: Path, samples: list[soak.Document], events: list[soak.Document]) -> dict[str, str]:
    """The first two cells of all rows."""
    run = {"minutes": 60, "window_s": 600, "ready_s": 20.0}
    (folder / "run.json").write_text(json.dumps(run), encoding="utf-8")
    for name, documents in (("samples", samples), ("events", events)):
        lines = "".join(json.dumps(document) + "\n" for document in documents)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return {row[0]: row[1] for table in soak.report(folder) for row in table.rows}


def test_a_flat_run(tmp_path: Path) -> None:
    rows = summed_up(tmp_path, [sample(at) for at in range(0, 3601, 10)], [{"kind": "ready", "severity": "notice"}])
    assert rows["verdict"].startswith("flat (limit: anonymous memory below 1024 KiB/h")
    assert rows["resident (VmRSS), MiB"] == "50.00"
    assert rows["descriptors"] == "20 (20 to 20)"
    assert rows["processor, % of a core"] == "1.00"
    assert rows["false restarts"] == "0 (generations 1, pids 77)"
    assert rows["warnings and worse in the history"] == "none"
    assert rows["all events in the history"] == "ready 1"
    assert rows["requests failed"] == "0"
    assert rows["50 to 60"] == "+0 (+0 to +0)"


def test_growth_that_fades_is_seen_window_by_window(tmp_path: Path) -> None:
    samples = [sample(at, anonymous_kib=30_720 + min(at, 900)) for at in range(0, 1811, 10)]
    rows = summed_up(tmp_path, samples, [])
    assert [rows.get(minutes) for minutes in ("0 to 10", "20 to 30", "30 to 30.2")] == [
        "+600 (+600 to +600)",
        "+0 (+0 to +0)",
        None,
    ]
    low, high = map(int, rows["10 to 20"].partition("(")[2].removesuffix(")").split(" to "))
    assert low < 300 < high


def test_a_run_that_is_not_flat_and_lost_its_engine(tmp_path: Path) -> None:
    other = {"state": "ready", "generation": 2, "pid": 78, "restarts": 1, "health": "ok"}
    samples = [sample(at, anonymous_kib=30_720 + at, descriptors=20 + at // 1800) for at in range(0, 3600, 10)]
    samples.append(
        sample(3600, anonymous_kib=34_320, descriptors=21, engine=other, reasons=["stalled"], problem="slow")
    )
    rows = summed_up(tmp_path, samples, [{"kind": "verdict", "severity": "error"}])
    assert "not flat: anonymous memory grows by 3600 KiB/h" in rows["verdict"]
    assert "descriptors went from 20 to 21" in rows["verdict"]
    assert rows["false restarts"] == "1 (generations 1, 2, pids 77, 78)"
    assert rows["acts on the engine in the history"] == "verdict 1"
    assert rows["warnings and worse in the history"] == "verdict 1"
    assert rows["reasons shown by status, looks"] == "stalled 1 of 361"
    assert rows["status not answered"] == "1 of 361"


def cells(table: Table) -> dict[str, tuple[str, ...]]:
    return {row[0]: row[1:] for row in table.rows}


def test_a_start_is_told_in_its_parts() -> None:
    settled, later = (Answer(0.010, 0.050, 32),) * 30, (Answer(0.0125, 0.060, 32),) * 5
    ours = [real.Start(20.0, real.Requests(Answer(0.011, 0.055, 32), settled, later), 0.5, 0.05, 1.25, 0.02)]
    bare = [real.Start(19.0, real.Requests(Answer(0.040, 0.100, 32), settled, later))]
    rows = cells(real.start_table(ours, bare))
    assert rows["engine started to ready (bare: to /health 200)"] == (
        "21.32 s (21.32 to 21.32, n = 1)",
        "19.00 s (19.00 to 19.00, n = 1)",
    )
    assert rows["engine started to first completion answered"][1].startswith("19.10 s")
    assert rows["added by supervision after /health 200, without the warm-up"][0].startswith("70 ms")
    first = cells(real.first_table(ours, bare))
    assert first["ours, after READY: time to first token"][3:5] == ("0.88 (0.88 to 0.88)", "1.10 (1.10 to 1.10)")
    assert first["bare, after /health 200: time to first token"][3:5] == ("3.20 (3.20 to 3.20)", "4.00 (4.00 to 4.00)")
    assert first["bare, after /health 200: whole answer"][4:] == ("2.00 (2.00 to 2.00)", "1.00")


@pytest.mark.parametrize(
    ("argv", "starts", "pairs"), [(["real"], 3, 8), (["real", "--gpu"], 5, 12), (["real", "--gpu", "--quick"], 1, 4)]
)
def test_how_much_is_measured(argv: list[str], starts: int, pairs: int) -> None:
    size = real.size_of(parse(argv))
    assert (size.starts, size.blocks * len(real.ORDER) // 2) == (starts, pairs)


def test_windows_are_paired_with_their_neighbours() -> None:
    rates = {"with": 99.0, "without": 100.0}
    measured = [
        real.Window(kind, rates[kind] * (1 + n // 2), 0.06 * (kind == "with")) for n, kind in enumerate(real.ORDER * 2)
    ]
    rows = cells(real.throughput_table(measured, 20.0, 0.002))
    assert rows["with / without (95 % CI)"] == ("0.9900 (0.9900 to 0.9900, 4 pairs)",)
    assert rows["estimated loss of one busy core"] == ("0.100 %",)
