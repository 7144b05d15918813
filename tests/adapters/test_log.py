"""The journal thread: readable or JSON lines, never blocking, losses counted and said."""

from __future__ import annotations

import io
import json
import threading
from typing import Any

from supervisord.core.messages import Record, Severity
from supervisord.log import Journal, printable


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_json_lines_carry_the_fields() -> None:
    out = io.StringIO()
    journal = Journal(out)
    journal.write(
        Record("restart", "qwen is started again", Severity.WARNING, "qwen", 3, "exited", {"delay_s": 1.5, "x": None})
    )
    journal.close()
    line: dict[str, Any] = json.loads(out.getvalue())
    del line["timestamp"]
    assert line == {
        "event": "qwen is started again",
        "level": "warning",
        "kind": "restart",
        "engine": "qwen",
        "generation": 3,
        "reason": "exited",
        "delay_s": 1.5,
    }


def test_a_terminal_gets_text_without_control_characters() -> None:
    out = Terminal()
    journal = Journal(out)
    journal.tell("x", "bad \x1b[2J\nline", Severity.INFO)
    journal.close()
    assert out.getvalue().split(" ", 1)[1] == "bad  [2J line\n"
    assert printable("a\x00b\u202ec") == "a b c"


def test_a_reader_that_does_not_read_costs_lines_not_time() -> None:
    gate = threading.Event()

    class Stuck(io.StringIO):
        def write(self, text: str) -> int:
            gate.wait(30)
            return super().write(text)

    out = Stuck()
    journal = Journal(out)
    for i in range(5000):
        journal.tell("x", f"line {i}")
    assert journal.dropped > 2000
    gate.set()
    journal.close(timeout_s=30)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    lost = [line["event"] for line in lines if line["kind"] == "log_lost"]
    assert len(lost) == 1
    assert lost[0].startswith(f"{journal.dropped} log lines were dropped")


def test_a_closed_stream_stops_nobody() -> None:
    out = io.StringIO()
    journal = Journal(out)
    out.close()
    journal.tell("x", "into the void")
    journal.close()
    assert journal.dropped == 1
