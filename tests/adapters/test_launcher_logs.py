"""Logs of engines: rotated, cut while they are written, read without trust."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from supervisord.launcher import logs
from tests.sim.engine import wait_until


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "qwen.log"


def open_and_close(path: Path, generation: int) -> int:
    descriptor, offset = logs.open_log(path, generation)
    os.close(descriptor)
    return offset


def test_a_generation_begins_with_a_header(log: Path) -> None:
    descriptor, offset = logs.open_log(log, 3)
    os.write(descriptor, b"hello\n")
    os.close(descriptor)
    text = log.read_text(encoding="utf-8")
    assert text.startswith("--- vllm-supervisor: generation 3 at 20")
    assert text[offset:] == "hello\n"
    assert log.stat().st_mode & 0o777 == 0o640
    assert logs.tail(log, offset, 10) == ("hello",)
    later = open_and_close(log, 4)
    assert later > offset
    assert logs.tail(log, later, 10) == ()


def test_a_link_is_not_followed(log: Path, tmp_path: Path) -> None:
    log.symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic"):
        logs.open_log(log, 1)


def _first_line(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.readline()


def test_large_logs_are_set_aside_at_a_launch_and_three_are_kept(log: Path) -> None:
    for generation in range(1, 6):
        offset = open_and_close(log, generation)
        assert offset < 100
        os.truncate(log, logs.ROTATE_BYTES)
    names = sorted(path.name for path in log.parent.iterdir())
    assert names == ["qwen.log", "qwen.log.1", "qwen.log.2", "qwen.log.3"]
    assert [_first_line(log.with_name(name)).split()[3] for name in names] == [b"5", b"4", b"3", b"2"]


def test_a_log_is_cut_while_it_is_written(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "CUT_BYTES", 4000)
    monkeypatch.setattr(logs, "ROTATE_BYTES", 1000)
    descriptor, _ = logs.open_log(log, 1)
    assert not logs.cut(log)
    os.write(descriptor, b"".join(b"line %04d\n" % n for n in range(500)))
    assert logs.cut(log)
    assert log.stat().st_size == 0
    kept = log.with_name("qwen.log.1").read_bytes()
    assert kept.endswith(b"line 0499\n")
    assert len(kept) == 1000
    os.write(descriptor, b"after\n")
    os.close(descriptor)
    assert log.read_bytes() == b"after\n"
    assert logs.tail(log, 0, 10) == ("after",)


def test_a_log_is_cut_even_if_its_end_cannot_be_kept(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "CUT_BYTES", 10)
    monkeypatch.setattr(logs, "ROTATE_BYTES", 10)
    log.write_bytes(bytes(100))
    log.with_name("qwen.log.1").touch()
    log.with_name("qwen.log.2").mkdir()
    log.with_name("qwen.log.3").touch()
    with pytest.raises(OSError, match="directory"):
        logs.cut(log)
    assert log.stat().st_size == 0


def test_tail_is_bounded_and_starts_at_the_generation(log: Path) -> None:
    log.write_text("old\n" + "".join(f"line {n}\n" for n in range(1000)), encoding="utf-8")
    assert logs.tail(log, 4, 3) == ("line 997", "line 998", "line 999")
    assert len(logs.tail(log, 4, 10_000)) == logs.TAIL_LINES
    assert logs.tail(log, 10**9, 1) == ("line 999",), "the log was cut since"
    assert logs.tail(log.with_name("none"), 0, 5) == ()
    log.write_bytes(b"x" * 200_000)
    (line,) = logs.tail(log, 0, 5)
    assert len(line) == logs.TAIL_BYTES


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"\x1b[31mred\x1b[0m", "red"),
        (b"\x1b]0;title\x07after", "after"),
        (b"\x1b]8;;http://x\x1b\\link", "link"),
        (b"a\x00b\x07c\x9bd", "abc\N{REPLACEMENT CHARACTER}d"),
        ("c1 \u009b2J".encode(), "c1 2J"),
        ("right \u202e to left \u2066".encode(), "right  to left "),
        (b"tab\there", "tab here"),
        ("ünïcødé 模型 █▌".encode(), "ünïcødé 模型 █▌"),
        (b"\xff\xfe", "\N{REPLACEMENT CHARACTER}" * 2),
        (b"10%|#   |\r50%|##  |\r99%|####|\r", "99%|####|"),
        (b"windows\r", "windows"),
        (b"", ""),
    ],
)
def test_what_could_steer_a_terminal_is_taken_out(log: Path, raw: bytes, shown: str) -> None:
    log.write_bytes(b"first\n" + raw + b"\n")
    assert logs.tail(log, 0, 10) == ("first", shown)


def test_different_lines_are_counted_once(log: Path) -> None:
    lines = logs.LinesOfFile(log, 0)
    assert lines.count() == 0
    with log.open("ab", buffering=0) as file:
        file.write(b"loading 1/8\nloading 2/8\nready?")
        assert lines.count() == 1
        file.write(b" yes\nloading 3/8\n")
        assert lines.count() == 2
        file.write(b"".join(b"12:00:%02d still waiting (%d s)\n" % (n, n) for n in range(60)))
        assert lines.count() == 3
        file.write(b"a\rb\rc\r")
        assert lines.count() == 6


def test_counting_lines_is_bounded(log: Path) -> None:
    letters = "abcdefghijklmnop"
    words = ["".join(letters[(n >> shift) & 15] for shift in (0, 4, 8, 12)) for n in range(6000)]
    log.write_text("\n".join(words) + "\n", encoding="utf-8")
    lines = logs.LinesOfFile(log, 0)
    assert lines.count() == 4096
    flood = logs.LinesOfFile(log, 0)
    with log.open("ab") as file:
        file.write(b"x" * (3 << 20))
    assert flood.count() == 0, "only the last MiB is read"


def test_counting_goes_on_after_a_cut(log: Path) -> None:
    log.write_text("one\ntwo\n", encoding="utf-8")
    lines = logs.LinesOfFile(log, 4)
    assert lines.count() == 1
    os.truncate(log, 0)
    log.write_text("x\n", encoding="utf-8")
    wait_until(lambda: lines.count() == 2, 1, "the new line")
