"""Documents of the daemon as the commands draw them: texts that anybody wrote, numbers of every size, the unknown."""

from __future__ import annotations

import json
import math
import os
import random
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, Final

import pytest
from jsonschema import Draft202012Validator

from supervisord import cli
from supervisord.cli import frame, render, render_engine, render_gpus, render_status, request, why
from supervisord.core import status
from supervisord.core.incident import Event
from supervisord.core.messages import Severity
from supervisord.core.story import document as story_document
from supervisord.core.story import tell
from supervisord.history_answers import stamp
from tests.adapters.fake_daemon import engine
from tests.fuzz.trying import DATA, NASTY, bounded, fuzz, mutated, mutated_json, same_kinds

SCHEMA: Final = Draft202012Validator(json.loads((Path(status.__file__).parents[1] / "status.schema.json").read_text()))
LOADED: Final = json.loads((DATA / "golden" / "status-load.json").read_text())
WALL: Final = 1_800_000_000.0


@fuzz(120)
def test_status(rng: random.Random) -> None:
    document = _valid(rng)
    width = rng.choice((1, 20, 40, 80, 200))
    for engine_ in document["engines"]:
        engine_["name"] = str(engine_["name"])
    with bounded("status", document):
        shown = render_status.view(document, width=width, colour=False, now=WALL)
        trouble = document["supervisor"].get("gpu_telemetry")
        shown += render_gpus.view(document["gpus"], document["supervisor"]["driver"], None, width=width, colour=False)
        for one in document["engines"]:
            shown += render_engine.view({**document, "engines": [one]}, width=width, colour=False, now=WALL)
            request.Goal("stop", one["name"], one).verdict(one)
        assert all(line.isprintable() for line in shown.split("\n"))
        assert trouble is None or isinstance(trouble, dict)
    with bounded("watch", document):
        history = frame.History()
        for at in range(3):
            history.add(document, float(at))
        events = [
            {"at": "2026-05-29T03:00:00Z", "message": rng.choice(NASTY), "severity": rng.choice(("error", "x"))}
        ] * 3
        size = (width, rng.choice((1, 3, 10, 24, 100)))
        lines = frame.frame(
            document,
            history,
            events,
            rng.choice((None, *NASTY)),
            size=size,
            colour=False,
            marks=frame.ASCII,
            times=(3.0, WALL),
        )
        assert len(lines) <= size[1]
        assert all(line.isprintable() for line in lines)


def _valid(rng: random.Random) -> Any:
    """A changed document that keeps to the schema; the first one tried if a few do not."""
    for _ in range(20):
        found = same_kinds(LOADED, rng)
        if SCHEMA.is_valid(found):
            return found
    return LOADED


def test_words_that_are_long() -> None:
    for part in ("a", "\u6a21", "e\u0301", "\u0335", "\U0001f600", "a ", "\t", "\x1b[", "\x1b]", "\x00"):
        text = part * (10_000 // len(part))
        for width in (1, 20, 200):
            with bounded("words", text, 20e-6):
                lines = render.wrap(text, width)
                assert sum(map(len, lines)) <= 2 * len(text) + 40 * len(lines)
                render.shorten(render.cell(text), width)
                render.clip(render.cell(text), width)


WORDS: Final = (
    "--socket", "/nonexistent/s", "--json", "--since", "2h", "1d12h", "2026-05-29T03:00:00Z", "--engine", "a", "-n",
    "5", "--timeout", "1.5", "--now", "--config", "/nonexistent/c", "--", "-x", "clear", "GPU-1", "release", "--help",
    "--only", "--watch", "--dry-run",
)  # fmt: skip
COMMANDS: Final = ("status", "events", "why", "logs", "stop", "restart", "gpu", "check-config", "plan", "reload")


@fuzz(250)
def test_command_lines(rng: random.Random) -> None:
    """There is no daemon: each ends with a sentence."""
    words = [rng.choice(COMMANDS), *(rng.choice(WORDS) for _ in range(rng.randrange(6)))]
    for _ in range(rng.randrange(3)):
        data = mutated([word.encode() for word in WORDS], rng).replace(b"\0", b"")
        words.insert(rng.randint(1, len(words)), os.fsdecode(data))
    argv = ["--socket", "/nonexistent/socket", *words]
    with bounded("command line", repr(argv)), pytest.MonkeyPatch.context() as patch:
        for name in ("COLUMNS", "LINES"):
            patch.setenv(name, rng.choice(NASTY).replace("\0", "").encode("utf-8", "ignore").decode())
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as told:
            code = cli.main(argv)
            render.terminal()
            render.rows()
        assert 0 <= code < 128
        assert "internal error" not in told.getvalue()
        assert told.getvalue().replace("\n", "").replace("\t", "").isprintable()


EVENTS: Final = [
    ("spawned", "info", None, {"pid": 5}),
    ("ready", "notice", None, {"took_s": 5.0}),
    ("exited", "error", "exited", {"code": 1, "exit_class": "crash", "restarts_in_window": 1, "max_restarts": 5,
    "failures": 1}),
    ("backoff", "warning", "exited", {"delay_s": 2.0, "restarts_in_window": 1, "max_restarts": 5, "failures": 2}),
    ("degraded", "warning", "kv_pressure", {"free_blocks": 5, "free_blocks_min": 100}),
    ("restart", "warning", "stalled", {"stalled_s": 200.0, "stall_after_s": 180.0}),
    ("failed", "error", "crash_loop", {"restarts_in_window": 6, "max_restarts": 5}),
    ("waiting", "notice", "port_held", {"port": 8000}),
    ("stopping", "notice", "operator", {}),
]  # fmt: skip


def _is_number(value: Any) -> bool:
    return isinstance(value, str | int | None) or (isinstance(value, float) and math.isfinite(value))


@fuzz(300)
def test_stories(rng: random.Random) -> None:
    """Any order of events, with any numbers: what an older or a newer daemon wrote is read too."""
    events = []
    for id_ in range(rng.randrange(12)):
        kind, severity, reason, numbers = rng.choice(EVENTS)
        told = {str(key): value for key, value in mutated_json(numbers or {"a": 1}, rng, rng.choice((0, 0, 1))).items()}
        plain = {key: value for key, value in told.items() if _is_number(value)}
        text = rng.choice(NASTY) if rng.random() < 0.3 else "engine a did something"
        at = rng.choice((1e9, 1e9 + id_, 0.0, 2e11))
        events.append(
            Event(id_, at, rng.choice("ab"), at - 1e9, Severity[severity.upper()], kind, text, "a", id_, reason, plain)
        )
    with bounded("story", repr(events)):
        known = rng.choice((None, engine("a")))
        story = tell("a", events, known, 1000.0, 1e9 + 50)
        shown = why.story(
            json.loads(json.dumps(story_document(story, stamp))), width=rng.choice((1, 40, 100)), colour=False, now=WALL
        )
        assert all(line.isprintable() for line in shown.split("\n"))
