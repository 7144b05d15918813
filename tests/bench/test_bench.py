"""The frame of the benchmarks, and a few measurements over a simulated engine: no other supervisor is needed."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.bench import __main__ as bench
from tests.bench import measures, ours, split
from tests.bench.attempts import FAILED, Attempts
from tests.bench.own import Ours, seen_in
from tests.bench.peer import DOWN, Seen
from tests.bench.processes import MARK, Memory, cpu_percent, family, memory, number_inside, parent
from tests.bench.report import ROOT, Part, Table, commit, quantile, spread, write
from tests.bench.scale import Cost
from tests.sim.engine import wait_until

TABLE = Table("Title", ("a", "b"), (("1", "x|y"), ("2", "z")), ("a note",))
PAGE = (
    "before\n<!-- ours: begin -->\nold\n<!-- ours: end -->\nbetween\n<!-- real: begin -->\n<!-- real: end -->\nafter\n"
)


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "benchmarks.md"
    path.write_text(PAGE, encoding="utf-8")
    return path


def test_a_table_is_markdown_whatever_is_in_its_cells() -> None:
    assert TABLE.markdown() == "### Title\n\n| a | b |\n| --- | --- |\n| 1 | x\\|y |\n| 2 | z |\n\n- a note\n"
    assert Table("T", ("a",), ()).markdown() == "### T\n\n| a |\n| --- |\n"


def test_a_spread_is_the_median_with_its_range() -> None:
    assert spread([3, 1, 2], "ms") == "2.0 ms (1.0 to 3.0, n = 3)"
    assert spread([0.25], "s", 2) == "0.25 s (0.25 to 0.25, n = 1)"


@pytest.mark.parametrize(("part", "value"), [(0, 1), (0.5, 51), (0.99, 100), (1, 100)])
def test_quantiles_are_values_that_were_seen(part: float, value: float) -> None:
    assert quantile(list(range(100, 0, -1)), part) == value


def test_a_part_is_written_between_its_marks_and_nowhere_else(page: Path) -> None:
    write("ours", "new \\1 text", page)
    write("ours", "newer \\1 text", page)
    expected = PAGE.replace("old\n", "\nnewer \\1 text\n")
    assert page.read_text(encoding="utf-8") == expected
    with pytest.raises(ValueError, match="cannot write the part soak"):
        write("soak", "text", page)
    assert page.read_text(encoding="utf-8") == expected


def test_the_page_has_all_parts() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert all(f"<!-- {part}: begin -->\n" in text and f"<!-- {part}: end -->\n" in text for part in bench.PARTS)


def test_a_part_says_when_where_and_how_it_was_measured() -> None:
    text = Part("ours").text([TABLE])
    for word in ("UTC", "commit", "cores", "GiB", "Linux", "Python", "load", "`scripts/bench ours`", "### Title"):
        assert word in text


def test_a_page_that_was_just_written_is_no_change_of_what_is_measured(tmp_path: Path) -> None:
    def git(*argv: str) -> None:
        author = ("-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", tmp_path, *author, *argv], check=True, capture_output=True)

    assert commit(tmp_path) == "no commit"
    git("init")
    (tmp_path / "docs").mkdir()
    page, code = tmp_path / "docs" / "benchmarks.md", tmp_path / "code.py"
    for path in (page, code):
        path.write_text("old\n", encoding="utf-8")
    git("add", ".")
    git("commit", "-m", "all")
    clean = commit(tmp_path)
    assert len(clean) >= 7
    page.write_text("new\n", encoding="utf-8")
    assert commit(tmp_path) == clean
    code.write_text("new\n", encoding="utf-8")
    assert commit(tmp_path) == f"{clean}+"


def test_parts_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SUPERVISOR_TEST_VLLM", "/opt/vllm/bin/vllm")
    monkeypatch.delenv("VLLM_SUPERVISOR_TEST_MODEL", raising=False)
    options = bench.parse([])
    assert options.parts == ["peers", "ours", "real"]
    assert (options.quick, options.minutes, options.vllm, options.model) == (
        False,
        60,
        Path("/opt/vllm/bin/vllm"),
        None,
    )
    mixed = bench.parse(["soak", "--minutes", "2.5", "peers"])
    assert (mixed.parts, mixed.minutes) == (["peers", "soak"], 2.5)
    assert bench.parse(["real", "--gpu", "--quick"]).gpu
    assert bench.parse(["all"]).parts == list(bench.PARTS)


CONTRADICTIONS = [
    (["soak", "--quick"], "cannot soak with --quick: give --minutes N"),
    (["all", "--quick"], "cannot soak with --quick: give --minutes N"),
    (["soak", "--gpu"], "cannot use --gpu with other parts than real: run scripts/bench real --gpu"),
    (["all", "--gpu"], "cannot use --gpu with other parts than real: run scripts/bench real --gpu"),
    (["--gpu"], "cannot use --gpu with other parts than real: run scripts/bench real --gpu"),
    (["ours", "--minutes", "5"], "cannot use --minutes without the part soak"),
]


@pytest.mark.parametrize(("argv", "text"), CONTRADICTIONS)
def test_parts_and_options_that_contradict_each_other_are_refused(
    argv: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.parse(argv)
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["nothing"], ["soak", "--minutes", "0"], ["soak", "--minutes", "x"]])
def test_what_cannot_be_understood_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.parse(argv)
    assert ended.value.code == 2
    assert argv[-1] in capsys.readouterr().err


def _gives(*notes: str) -> Callable[[str], bench.Measure]:
    return lambda _: lambda _: [Table("Title", ("a",), (("1",),), notes)]


def _fails(_: str) -> bench.Measure:
    def measure(_: argparse.Namespace) -> list[Table]:
        raise OSError("no such engine")

    return measure


def test_a_part_is_written_as_soon_as_it_is_measured(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.one("ours", bench.parse([]), page, _gives("a note"))
    assert "### Title" in page.read_text(encoding="utf-8")
    assert "### Title" in capsys.readouterr().out


def test_a_quick_run_writes_nothing(page: Path) -> None:
    assert bench.one("ours", bench.parse(["--quick"]), page, _gives())
    assert page.read_text(encoding="utf-8") == PAGE


def test_a_part_on_a_gpu_is_one_of_its_own(page: Path) -> None:
    marks = "<!-- real --gpu: begin -->\n<!-- real --gpu: end -->\n"
    page.write_text(PAGE + marks, encoding="utf-8")
    assert bench.one("real", bench.parse(["real", "--gpu"]), page, _gives())
    kept, _, written = page.read_text(encoding="utf-8").partition("<!-- real --gpu: begin -->\n")
    assert kept == PAGE
    assert "`scripts/bench real --gpu` repeats it" in written


def test_a_part_that_fails_says_so_and_leaves_the_page(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not bench.one("ours", bench.parse([]), page, _fails)
    assert page.read_text(encoding="utf-8") == PAGE
    assert "cannot measure the part ours: no such engine" in capsys.readouterr().out


def test_a_measurement_that_fails_is_told_in_the_page(page: Path) -> None:
    attempts = Attempts()

    def measure() -> int:
        raise TimeoutError("waited 5 s\nand more")

    assert attempts.of("the lag", measure) is None
    assert attempts.of("one", lambda: 1) == 1
    assert attempts.notes == [f"{FAILED} measure the lag: waited 5 s"]
    assert not bench.one("ours", bench.parse([]), page, _gives(*attempts.notes))
    assert "- cannot measure the lag: waited 5 s" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        (["--help"], 0, "usage: scripts/bench"),
        (["peas"], 64, "peas"),
        (["--minutes", "0"], 64, "cannot soak for 0 minutes"),
        *((argv, 64, text) for argv, text in CONTRADICTIONS),
    ],
)
def test_the_command_explains_itself(argv: list[str], code: int, text: str) -> None:
    done = subprocess.run([ROOT / "scripts" / "bench", *argv], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert text in done.stdout + done.stderr


# ---- processes ------------------------------------------------------------------------------------------------------


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    """A shell with a child that is no engine's, and one that is."""
    text = f"{sys.executable} -c 'while True: pass' & {MARK}=x sleep 60 & wait"
    with subprocess.Popen(["sh", "-c", text], start_new_session=True) as process:
        yield process
        os.killpg(process.pid, 9)


def test_a_supervisor_is_all_that_descends_from_it_but_its_engines(busy: subprocess.Popen[bytes]) -> None:
    found = wait_until(lambda: own if len(own := family([busy.pid])) == 2 else [], 30, "a shell and its child")
    assert busy.pid in found
    assert {parent(pid) for pid in found} == {os.getpid(), busy.pid}
    percent, kinds = cpu_percent(lambda: found, 0.2, lambda pid, *_: "shell" if pid == busy.pid else "child")
    assert percent == pytest.approx(sum(kinds.values()))
    assert kinds["child"] > kinds["shell"]
    both, one = memory(found), memory([busy.pid])
    assert (both.processes, one.processes) == (2, 1)
    assert both.rss_mib > one.rss_mib >= one.pss_mib > 0
    assert number_inside(os.getpid()) > 0


def test_a_99th_percentile_needs_a_hundred_values() -> None:
    idle, killed = [1.0] * 98 + [2.0], [1.0] * 98 + [2.0, 3.0]
    rows = ours.turns_table([Cost(8, 0.2, {}, 0.1, Memory(30, 20, 1), 9, 20, idle, killed)]).rows
    assert rows == (
        ("8", "99", "1.00", "-", "2.00"),
        ("8, one killed every second for 10 s", "100", "1.00", "3.00", "3.00"),
    )


def test_a_missed_target_names_the_table_with_its_parts() -> None:
    cost = Cost(8, 0.2, {}, 0.1, Memory(30, 20, 1), 9, 20, [])
    status: dict[int, split.Status | None] = {8: split.Status([160.0], [20.0], [10.0], 0, 0)}
    table = ours.targets_table({8: cost}, status, None, [120.0], [])
    assert [row[3] for row in table.rows] == [
        "-",
        "reached",
        "reached",
        f"**missed**: 2.0 times as much; see *{ours.STATUS}*",
        "-",
        "**missed**: 1.2 times as much",
    ]


# ---- measurements ---------------------------------------------------------------------------------------------------


def test_an_engine_in_what_status_says() -> None:
    text = '{"engines": [{"name": "a", "state": "ready", "pid": 7}, {"name": "b", "state": "starting", "pid": 8}]}'
    assert [seen_in(text, name) for name in "abc"] == [Seen(up=True, pid=7), Seen(up=False, pid=8), DOWN]
    assert seen_in("cannot reach the daemon", "a") == DOWN


def test_crash_to_relaunch_with_its_parts() -> None:
    found = split.relaunch(2, tree=False)
    assert len(found.total) == len(found.told) == len(found.spawn) == 2
    assert all(0 < part < whole for part, whole in zip(found.spawn, found.total, strict=True))
    assert all(part > 0 for part in found.fsync)
    assert all(0 < gone < whole for gone, whole in zip(found.gone, found.total, strict=True))


def test_orphans_are_counted() -> None:
    found = measures.orphans(Ours(), 60)
    assert (found.at_start, found.later, found.of) == (0, 0, 2)
