"""Receivers side by side: none waits for another, nobody waits for them, and the end is bounded."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from supervisord.config import load
from supervisord.core.messages import Record, Severity
from supervisord.core.spec import NotifySpec
from supervisord.webhook import post
from supervisord.webhook.notice import Notice, body
from supervisord.webhook.notifier import Webhooks
from supervisord.webhook.outbox import Stats
from tests.adapters.fake_http import FakeServer, answer, unused_port, wait_for

EXITED = Record("exited", "qwen ended by itself: exit code 1", Severity.ERROR, "qwen", 3, "exited", {"code": 1})
SPAWNED = Record("spawned", "qwen started", engine="qwen", generation=4)
PAGE = Path(__file__).parents[2] / "docs" / "notifications.md"
SOON_S = 20.0
"""What takes a moment, on a busy machine."""


class Told:
    """What is told of receivers, and to them: the voice of a daemon."""

    def __init__(self) -> None:
        self.hooks = Webhooks()
        self.records: SimpleQueue[Record] = SimpleQueue()

    def __call__(self, record: Record) -> None:
        self.records.put(record)
        self.hooks.offer(record)

    def use(self, *specs: NotifySpec) -> list[str]:
        return self.hooks.use({spec.name: spec for spec in specs}, self)

    def next(self) -> Record:
        return self.records.get(timeout=20)

    def rest(self) -> list[Record]:
        return [self.records.get() for _ in range(self.records.qsize())]


@contextmanager
def telling(*specs: NotifySpec) -> Iterator[Told]:
    told = Told()
    told.use(*specs)
    try:
        yield told
    finally:
        told.hooks.close(1.0)


def spec(name: str, port: int, **fields: Any) -> NotifySpec:
    return NotifySpec(name=name, url=f"http://127.0.0.1:{port}/precious-{name}", **fields)


def documents(server: FakeServer) -> list[dict[str, Any]]:
    return [json.loads(request.body) for request in server.requests]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_the_page_for_operators_says_what_is_so(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("".join(blocks("toml")), encoding="utf-8")
    path.chmod(0o600)
    assert load(path, trust=False, check_files=False).spec.notify.keys() == {"ops", "night", "archive"}
    (example,) = map(json.loads, blocks("json"))
    message = body(Notice("1", 0.0, EXITED), "gpu-01")
    assert list(example) == list(json.loads(message))
    assert all(f"`{field}`" in PAGE.read_text(encoding="utf-8") for field in example)

    port = unused_port()
    (program,) = blocks("python")
    command = [sys.executable, "-c", program.replace("8080", str(port))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as receiver:
        try:
            wait_for(lambda: post.send(spec("ops", port), message, 5).ok)
            assert receiver.stdout is not None
            assert receiver.stdout.readline() == "gpu-01: error: qwen ended by itself: exit code 1\n"
        finally:
            receiver.kill()


def test_each_is_told_what_it_asked_for() -> None:
    with FakeServer(lambda _: answer(200)) as one, FakeServer(lambda _: answer(200)) as all_of_it:
        with telling(spec("one", one.port), spec("all", all_of_it.port, events=("all",))) as told:
            told.hooks.offer(EXITED)
            told.hooks.offer(SPAWNED)
            wait_for(lambda: [stats.delivered for stats in told.hooks.stats().values()] == [1, 2])
            assert told.rest() == [], "what works is not told"
        (document,) = documents(one)
        assert [each["kind"] for each in documents(all_of_it)] == ["exited", "spawned"]
        assert documents(all_of_it)[0] == document, "with the same id for both"
    assert (document["engine"], document["generation"], document["numbers"]) == ("qwen", 3, {"code": 1})
    assert document["message"] == EXITED.message


def test_a_receiver_that_hangs_holds_up_nobody() -> None:
    with (
        FakeServer(lambda _: hangs.hang()) as hangs,
        FakeServer(lambda _: answer(200)) as works,
        telling(spec("hangs", hangs.port, timeout_s=60), spec("works", works.port)) as told,
    ):
        began = time.monotonic()
        for number in range(100):
            told.hooks.offer(replace(EXITED, engine=f"e{number}"))
        assert time.monotonic() - began < SOON_S
        wait_for(lambda: told.hooks.stats()["works"].delivered == 100)
        assert told.hooks.stats()["hangs"] == Stats(waiting=100)
        began = time.monotonic()
        told.hooks.close(0.5)
        assert 0.5 <= time.monotonic() - began < SOON_S
        (lost,) = told.rest()
    assert lost.kind == "notify_lost"
    assert lost.message.startswith("100 messages to notify.hangs (http://127.0.0.1:")
    assert "precious" not in lost.message


def test_an_outage_is_told_to_the_log_and_to_the_others_alone() -> None:
    port = unused_port()
    with (
        FakeServer(lambda _: answer(200)) as other,
        telling(spec("down", port, events=("all",)), spec("other", other.port, events=("daemon",))) as told,
    ):
        told.hooks.offer(EXITED)
        failing = told.next()
        assert (failing.kind, failing.severity) == ("notify_failing", Severity.WARNING)
        assert failing.message == (
            f"cannot notify notify.down (http://127.0.0.1:{port}/...): no connection: Connection refused; "
            "it is tried again"
        )
        with FakeServer(lambda _: answer(200), port=port) as down:
            recovered = told.next()
            assert (recovered.kind, recovered.numbers["lost"]) == ("notify_recovered", 0)
            assert [each["kind"] for each in documents(down)] == ["exited"], "once, and nothing about itself"
        wait_for(lambda: len(other.requests) == 2)
        assert [each["kind"] for each in documents(other)] == ["notify_failing", "notify_recovered"]
        assert told.hooks.stats()["down"] == Stats(delivered=1)


def test_first_500_then_200() -> None:
    with FakeServer(lambda _: answer(500 if len(server.requests) == 1 else 200)) as server:
        with telling(spec("ops", server.port)) as told:
            told.hooks.offer(EXITED)
            assert [told.next().kind, told.next().kind] == ["notify_failing", "notify_recovered"]
        first, second = documents(server)
        assert first == second, "the same message with the same id"


def test_other_settings_apply_at_once_to_what_waits() -> None:
    wrong = spec("ops", unused_port(), events=("failed",))
    with FakeServer(lambda _: answer(200)) as server, telling(wrong) as told:
        told.hooks.offer(EXITED)
        told.hooks.offer(Record("failed", "crash loop", Severity.ERROR, "qwen"))
        assert told.next().kind == "notify_failing"
        assert told.use(wrong) == []
        right = spec("ops", server.port)
        assert told.use(right) == ["notify.ops: its settings changed: used from now on"]
        assert told.next().kind == "notify_recovered"
        told.hooks.offer(EXITED)
        wait_for(lambda: len(server.requests) == 2)
        assert [each["kind"] for each in documents(server)] == ["failed", "exited"]
        added = spec("new", server.port)
        assert told.use(right, added) == ["notify.new: is new: told from now on"]
        assert told.use(added) == ["notify.ops: is no longer configured: told nothing more"]
        told.hooks.offer(replace(EXITED, engine="other"))
        wait_for(lambda: len(server.requests) == 3)
        assert server.requests[2].path == "/precious-new"
        assert told.hooks.stats().keys() == {"new"}


def test_a_receiver_that_is_removed_gets_what_waits_for_it() -> None:
    with FakeServer(lambda _: answer(200)) as server, telling(spec("ops", server.port)) as told:
        told.hooks.offer(EXITED)
        told.hooks.offer(EXITED)
        wait_for(lambda: len(server.requests) == 1)
        told.use()
        wait_for(lambda: len(server.requests) == 2)
        assert documents(server)[1]["id"] != documents(server)[0]["id"]


def test_the_end_delivers_what_waits() -> None:
    with FakeServer(lambda _: answer(200)) as server:
        with telling(spec("ops", server.port, events=("all",))) as told:
            told.hooks.offer(EXITED)
            wait_for(lambda: server.requests)
            for record in (EXITED, SPAWNED, Record("daemon_ended", "ended")):
                told.hooks.offer(record)
            told.hooks.close(SOON_S)
            assert told.rest() == []
        assert [each["kind"] for each in documents(server)].count("exited") == 2
        assert {each["kind"] for each in documents(server)} == {"exited", "spawned", "daemon_ended"}


def test_the_end_does_not_try_for_long() -> None:
    with telling(spec("ops", unused_port())) as told:
        told.hooks.offer(EXITED)
        assert told.next().kind == "notify_failing"
        began = time.monotonic()
        told.hooks.close(30.0)
        assert time.monotonic() - began < SOON_S, "one more attempt, and no pause after it"
        assert [record.kind for record in told.rest()] == ["notify_lost"]
        told.hooks.offer(EXITED)
        assert told.hooks.stats()["ops"] == Stats(failed=1, failing=True)


def test_a_bug_costs_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    real = post.send

    def send(*args: Any) -> Any:
        if b'"exited"' in args[1]:
            raise RuntimeError("https://example.com/precious")
        return real(*args)

    monkeypatch.setattr(post, "send", send)
    with FakeServer(lambda _: answer(200)) as server, telling(spec("ops", server.port)) as told:
        told.hooks.offer(EXITED)
        failing = told.next()
        assert "internal error: RuntimeError; please report it" in failing.message
        assert "precious" not in failing.message
        told.hooks.offer(Record("failed", "crash loop", Severity.ERROR, "qwen"))
        wait_for(lambda: server.requests)
