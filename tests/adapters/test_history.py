"""The history on disk: bounded, private, readable while it is written, and never in anybody's way."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from supervisord import history, history_read, history_store, history_writer
from supervisord.core import codec
from supervisord.core.messages import Due, Record, Sampled, Severity, What
from supervisord.core.model import Node, Sample
from supervisord.core.spec import NodeSpec
from supervisord.history import History
from supervisord.history_read import Reader, UnreadableError
from supervisord.history_store import BUCKET_S, DAY_S, BrokenError, Limits, Rows, Store, set_aside
from tests.core.play import engine_spec, new_node, node_spec

NODE = new_node(node_spec(engine_spec("a", env={"HF_TOKEN": "hf_precious"})))
POLL = Due(What.POLL)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits half a second in a test for what comes together."""
    monkeypatch.setattr(history, "GATHER_S", 0.01)
    monkeypatch.setattr(history_writer, "RETRY_S", 0.02)
    monkeypatch.setattr(history_writer, "SETTLED_S", 0.0)


def told(message: str = "a is ready", **fields: Any) -> Record:
    return Record(**{"kind": "ready", "message": message, "engine": "a", "generation": 1, **fields})


def until(condition: Callable[[], object], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(0.01)


@contextmanager
def running(folder: Path, **limits: Any) -> Iterator[tuple[History, list[str]]]:
    troubles: list[str] = []
    kept = History(folder, troubles.append, Limits(**limits))
    try:
        yield kept, troubles
    finally:
        kept.close(20)


def query(folder: Path, text: str) -> list[Any]:
    with closing(sqlite3.connect(folder / history_store.FILE)) as connection:
        return connection.execute(text).fetchall()


def has(kept: History, message: str) -> bool:
    """Whether it can be read already; for a moment nothing can."""
    try:
        return message in messages(kept)
    except UnreadableError:
        return False


def messages(kept: History, **wanted: Any) -> list[str]:
    page = kept.page(**{"engine": None, "since": None, "after": None, "limit": 1000, **wanted})
    return [event.message for event in page.events]


# --- what is written --------------------------------------------------------------------------------------------------


def test_an_event_comes_back_as_it_was_told(tmp_path: Path) -> None:
    before = time.time()
    with running(tmp_path) as (kept, troubles):
        numbers = {"delay_s": 1.5, "code": None, "n": 3, "nan": float("nan"), "actor": "uid 7\udcff"}
        kept.record(
            told("a \x1b[31mé\udcff", kind="restart", severity=Severity.WARNING, reason="exited", numbers=numbers)
        )
        kept.record(Record("daemon_started", "runs"))
        kept.wait(0, 20)
        until(lambda: len(messages(kept)) == 2)
        first, second = kept.page(None, None, None, 10).events
    assert (first.id, first.kind, first.engine, first.generation, first.reason) == (1, "restart", "a", 1, "exited")
    assert first.severity is Severity.WARNING
    assert first.message == "a \x1b[31mé?", "what is no UTF-8 is replaced; terminals are the reader's business"
    assert first.numbers == {"delay_s": 1.5, "code": None, "n": 3, "nan": None, "actor": "uid 7?"}
    assert before <= first.at <= second.at <= time.time()
    assert 0 < first.now <= time.monotonic()
    assert (second.engine, second.generation, second.reason, second.numbers) == (None, None, None, {})
    assert history_read.document(first, "T") == {
        "id": 1,
        "at": "T",
        "severity": "warning",
        "kind": "restart",
        "engine": "a",
        "generation": 1,
        "reason": "exited",
        "message": "a \x1b[31mé?",
        "numbers": {"delay_s": 1.5, "code": None, "n": 3, "nan": None, "actor": "uid 7?"},
    }
    assert troubles == []


def test_observations_are_kept_with_a_node_to_start_from(tmp_path: Path) -> None:
    for pid in (1, 2):
        with running(tmp_path) as (kept, _):
            for n in range(5):
                kept.observe(replace(NODE, pid=pid), POLL, 100.25 + n)
    first, second = Reader(tmp_path / history_store.FILE).recordings()
    assert (first.node.pid, second.node.pid) == (1, 2)
    assert first.seen == tuple((100.25 + n, POLL) for n in range(5))
    assert first.node.spec.engines["a"].env == {"HF_TOKEN": "(hidden)"}
    assert b"precious" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())


def test_a_node_is_written_every_hour(tmp_path: Path) -> None:
    with running(tmp_path) as (kept, _):
        for minute in range(150):
            kept.observe(replace(NODE, pid=minute), POLL, minute * 60.0)
    recordings = list(Reader(tmp_path / history_store.FILE).recordings())
    assert [(r.node.pid, len(r.seen)) for r in recordings] == [(0, 60), (60, 60), (120, 30)]


def test_samples_are_summed_up_by_five_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wall = [1_800_000_000.0]
    monkeypatch.setattr("supervisord.history_rows.time.time", lambda: wall[0])
    for values in ((1, None), (3, 8)):
        with running(tmp_path) as (kept, _):
            for running_, waiting in [values] * 2:
                sample = Sample(at=1.0, running=running_, waiting=waiting, kv_usage=float("nan"))
                kept.observe(NODE, Sampled("a", 1, sample), 5.0)
    with running(tmp_path) as (kept, _):
        kept.observe(NODE, Sampled("a", 1, Sample(at=1.0, running=9)), 5.0)
        until(lambda: kept._packer._numbers)
        wall[0] += BUCKET_S
        kept.observe(NODE, POLL, 6.0)
        until(lambda: not kept._packer._numbers)
    rows = query(tmp_path, "SELECT bucket, engine, name, n, mean, low, high FROM samples ORDER BY name")
    bucket = 1_800_000_000 // BUCKET_S
    assert rows == [(bucket, "a", "running", 5, 3.4, 1.0, 9.0), (bucket, "a", "waiting", 2, 8.0, 8.0, 8.0)]


def test_the_file_is_ours_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with running(tmp_path) as (kept, _):
            kept.record(told())
            kept.wait(0, 20)
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    finally:
        os.umask(old)
    assert modes == {f"history.sqlite3{end}": 0o600 for end in ("", "-wal", "-shm")}
    (tmp_path / history_store.FILE).chmod(0o644)
    with running(tmp_path) as (kept, _):
        kept.record(told())
    assert stat.S_IMODE((tmp_path / history_store.FILE).stat().st_mode) == 0o600


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / history_store.FILE).symlink_to(victim)
    with running(tmp_path) as (kept, troubles):
        kept.record(told())
        kept.wait(0, 20)
        assert messages(kept) == ["a is ready"]
    assert victim.read_text() == "precious"
    assert "link" in troubles[0]


def test_it_survives_the_daemon_and_goes_on(tmp_path: Path) -> None:
    for n in (1, 2):
        with running(tmp_path) as (kept, troubles):
            kept.record(told(f"run {n}"))
        assert troubles == []
    with running(tmp_path) as (kept, _):
        assert messages(kept) == ["run 1", "run 2"]
        assert query(tmp_path, "PRAGMA user_version") == [(history_store.VERSION,)]
        assert query(tmp_path, "PRAGMA journal_mode") == [("wal",)]
        assert query(tmp_path, "PRAGMA auto_vacuum") == [(2,)], "incremental"


def test_an_older_version_is_brought_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path) as (kept, _):
        kept.record(told("old"))
    monkeypatch.setattr(history_store, "VERSION", 2)
    monkeypatch.setattr(history_store, "MIGRATIONS", (("ALTER TABLE events ADD COLUMN more TEXT",),))
    with running(tmp_path) as (kept, troubles):
        kept.record(told("new"))
        kept.wait(0, 20)
        assert messages(kept) == ["old", "new"]
    assert troubles == []
    assert query(tmp_path, "SELECT count(more) FROM events") == [(0,)]
    assert query(tmp_path, "PRAGMA user_version") == [(2,)]


# --- reading ----------------------------------------------------------------------------------------------------------


def reaches(kept: History, last_id: int) -> bool:
    return kept.page(None, None, None, 1).last_id == last_id


def filled(folder: Path, count: int) -> History:
    kept = History(folder, lambda _: None)
    for n in range(1, count + 1):
        kept.record(told(f"{n}", engine="ab"[n % 2]))
        if n % 1000 == 0 or n == count:
            until(partial(reaches, kept, n))
    return kept


def test_pages(tmp_path: Path) -> None:
    with closing(filled(tmp_path, 25)) as kept:
        assert messages(kept, limit=3) == ["23", "24", "25"], "the newest ones, oldest first"
        assert messages(kept, limit=3, engine="b") == ["21", "23", "25"]
        page = kept.page(None, None, 0, 10)
        assert [event.id for event in page.events] == list(range(1, 11))
        assert (page.last_id, page.more) == (10, True)
        page = kept.page(None, None, 20, 10)
        assert ([event.id for event in page.events], page.last_id, page.more) == ([21, 22, 23, 24, 25], 25, False)
        assert kept.page("a", None, 24, 10).last_id == 25, "what is not of this engine is passed over"
        assert kept.page(None, None, 25, 10).events == ()
        assert len(kept.page(None, None, 9999, 50).events) == 25, "an id of a history that was begun anew since"
        assert messages(kept, since=time.time() + 60) == []
        assert len(messages(kept, since=time.time() - 60, limit=5)) == 5
        assert messages(kept, since=time.time() - 60, limit=2) == ["1", "2"]
        assert messages(kept, engine="nobody") == []
        assert (kept.knows("a"), kept.knows("nobody")) == (True, False)


def test_a_page_is_bounded_in_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_read, "PAGE_CHARS", 30_000)
    with running(tmp_path) as (kept, _):
        for _ in range(5):
            kept.record(told("x" * 20_000))
        until(lambda: kept.page(None, None, None, 1).last_id == 5)
        page = kept.page(None, None, 0, 10)
        assert (len(page.events), page.last_id, page.more) == (1, 1, True)
        assert len(page.events[0].message) == 16_384, "and so is a message"
        assert [event.id for event in kept.page(None, None, None, 10).events] == [5]


def test_waiting_ends_with_the_next_event(tmp_path: Path) -> None:
    with running(tmp_path) as (kept, _):
        started = time.monotonic()
        kept.wait(0, 0.05)
        assert time.monotonic() - started < 10
        threading.Timer(0.1, kept.record, [told()]).start()
        kept.wait(0, 20)
        assert messages(kept) == ["a is ready"]
        assert time.monotonic() - started < 15


def test_a_reader_sees_all_that_was_told_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within moments, and not when the thread has gathered enough."""
    monkeypatch.setattr(history, "GATHER_S", 600.0)
    monkeypatch.setattr(history, "SETTLE_S", 60.0)
    with running(tmp_path) as (kept, _):
        for number in range(50):
            kept.record(told(f"{number}"))
            assert [event.message for event in kept.page(None, None, None, 100).events][-1] == f"{number}"


def test_before_there_is_a_file_there_are_no_events(tmp_path: Path) -> None:
    reader = Reader(tmp_path / history_store.FILE)
    assert reader.page(None, None, None, 10).events == ()
    assert not reader.knows("a")
    assert list(reader.recordings()) == []


def test_an_answer_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    filled(tmp_path, 3000).close()
    with pytest.raises(UnreadableError, match="within 0 s") as raised:
        Reader(tmp_path / history_store.FILE, 0.0).page(None, 1e12, None, 10)
    assert raised.value.slow


def test_what_cannot_be_opened_is_said(tmp_path: Path) -> None:
    (tmp_path / history_store.FILE).mkdir()
    with pytest.raises(UnreadableError, match=r"cannot read the history .*/history\.sqlite3: "):
        Reader(tmp_path / history_store.FILE).page(None, None, None, 10)


def test_many_read_while_it_is_written(tmp_path: Path) -> None:
    stop, failures = threading.Event(), []
    with running(tmp_path) as (kept, troubles):
        kept.record(told())
        kept.wait(0, 20)

        def read() -> None:
            last = 0
            while not stop.is_set():
                page = kept.page(None, None, last, 100)
                if [event.id for event in page.events] != list(range(last + 1, page.last_id + 1)):
                    failures.append((last, page))
                last = page.last_id

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for n in range(1500):
            kept.record(told(str(n)))
            if n % 100 == 0:
                time.sleep(0.02)
        until(lambda: kept.page(None, None, None, 1).last_id == 1501)
        stop.set()
        for thread in threads:
            thread.join(20)
    assert failures == []
    assert troubles == []


# --- bounds -----------------------------------------------------------------------------------------------------------


def store(folder: Path, **limits: Any) -> Store:
    return Store(folder / history_store.FILE, Limits(**limits))


def an_event(at: float) -> tuple[Any, ...]:
    return (at, "boot", 1.0, 6, "ready", "a", 1, None, "m", "{}")


def test_old_events_go_and_so_do_too_many(tmp_path: Path) -> None:
    with closing(store(tmp_path, events_max=50, events_for_s=100.0, rows_per_turn=15)) as kept:
        kept.write(Rows(events=tuple(an_event(1000.0 + n) for n in range(40))))
        kept.prune(1120.0)
        assert query(tmp_path, "SELECT min(id), max(id) FROM events") == [(16, 40)], "a turn has its own bound"
        kept.prune(1120.0)
        assert query(tmp_path, "SELECT min(id) FROM events") == [(21,)]
        kept.write(Rows(events=tuple(an_event(1120.0) for _ in range(60))))
        for _ in range(3):
            kept.prune(1120.0)
        assert query(tmp_path, "SELECT min(id), max(id), count(*) FROM events") == [(51, 100, 50)]
        for _ in range(6):
            kept.prune(5000.0)
        assert query(tmp_path, "SELECT count(*) FROM events") == [(0,)]
        kept.prune(5000.0)
    with closing(store(tmp_path)) as kept:
        assert kept.last_id == 100, "ids are never used twice"


def test_old_observations_go_up_to_a_node(tmp_path: Path) -> None:
    with closing(store(tmp_path, observations_for_s=100.0)) as kept:
        chunks = tuple((1000.0 + n, "boot", n % 10 == 0, b"x") for n in range(40))
        kept.write(Rows(chunks=chunks))
        kept.prune(1050.0)
        assert query(tmp_path, "SELECT count(*) FROM observations") == [(40,)]
        kept.prune(1125.5)
        assert query(tmp_path, "SELECT min(at), count(*) FROM observations") == [(1020.0, 20)]


def test_old_samples_go(tmp_path: Path) -> None:
    with closing(store(tmp_path, samples_for_s=3000.0)) as kept:
        kept.write(Rows(samples=tuple((bucket, "a", "running", 1, 1.0, 1.0, 1.0) for bucket in range(20))))
        kept.prune(20.0 * BUCKET_S)
        assert query(tmp_path, "SELECT min(bucket) FROM samples") == [(10,)]


def test_the_file_does_not_grow_beyond_its_bound(tmp_path: Path) -> None:
    limit = 2 << 20
    largest = 0
    with closing(store(tmp_path, bytes_max=limit)) as kept:
        kept.write(Rows(events=tuple(an_event(1000.0) for _ in range(100))))
        for n in range(400):
            kept.write(Rows(chunks=((1000.0, "boot", n % 50 == 0, os.urandom(20_000)),)))
            if n % 5 == 0:
                kept.prune(1000.0)
            largest = max(largest, kept.bytes_used())
        kept.prune(1000.0)
        assert query(tmp_path, "SELECT count(*) FROM events") == [(100,)], "events outlive observations"
    assert largest < limit * 1.2
    assert (tmp_path / history_store.FILE).stat().st_size < limit * 1.2
    assert DAY_S == 86_400.0


def test_the_thread_prunes_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_writer, "PRUNE_EVERY_S", 0.0)
    with running(tmp_path, events_max=10) as (kept, _):
        for n in range(30):
            kept.record(told(str(n)))
        until(lambda: messages(kept) and messages(kept)[-1] == "29")
        kept.observe(NODE, POLL, 1.0)
        until(lambda: messages(kept) == [str(n) for n in range(20, 30)])


@pytest.mark.parametrize("jump_s", [-400 * DAY_S, 400 * DAY_S])
def test_a_clock_that_jumps_empties_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    monkeypatch.setattr(history_writer, "PRUNE_EVERY_S", 0.0)
    with running(tmp_path) as (kept, _):
        for n in range(3):
            kept.record(told(f"before {n}"))
        until(partial(has, kept, "before 2"))
        true = time.time
        monkeypatch.setattr(time, "time", lambda: true() + jump_s)
        for n in range(3):
            kept.record(told(f"after {n}"))
            until(partial(has, kept, f"after {n}"))  # each is written in a turn of its own, which prunes
        assert messages(kept) == [f"{when} {n}" for when in ("before", "after") for n in range(3)]


# --- trouble ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"no database at all" * 100, b"SQLite format 3\0" + b"\xff" * 5000])
def test_what_is_no_database_is_kept_aside(tmp_path: Path, content: bytes) -> None:
    (tmp_path / history_store.FILE).write_bytes(content)
    with running(tmp_path) as (kept, troubles):
        kept.observe(NODE, POLL, 1.0)
        kept.record(told())
        kept.wait(0, 20)
        assert messages(kept) == ["a is ready"]
    [aside] = tmp_path.glob("history.sqlite3.broken-*")
    assert aside.read_bytes() == content
    assert len(troubles) == 1
    assert troubles[0].startswith(f"cannot use {tmp_path / history_store.FILE} (")
    assert aside.name in troubles[0]


def test_databases_of_others_and_of_newer_versions_are_kept_aside(tmp_path: Path) -> None:
    for statement, why in (("CREATE TABLE x (y)", "somebody else's"), ("PRAGMA user_version = 7", "version 7")):
        with closing(sqlite3.connect(tmp_path / history_store.FILE)) as connection:
            connection.execute(statement)
            connection.commit()
        with running(tmp_path) as (kept, troubles):
            kept.record(told())
            kept.wait(0, 20)
        assert why in troubles[0]
        (tmp_path / history_store.FILE).unlink()


@pytest.mark.parametrize(
    "statement",
    [
        "ALTER TABLE events RENAME COLUMN kind TO sort",
        "DROP TABLE observations",
        "CREATE UNIQUE INDEX one_engine ON events (engine, at)",
        "CREATE TRIGGER never BEFORE INSERT ON events BEGIN SELECT RAISE(ABORT, 'no'); END",
        "UPDATE sqlite_sequence SET seq = 9223372036854775807",
    ],
)
def test_tables_that_cannot_be_written_are_kept_aside(tmp_path: Path, statement: str) -> None:
    filled(tmp_path, 5).close()
    with closing(sqlite3.connect(tmp_path / history_store.FILE)) as connection:
        connection.execute(statement)
        connection.commit()
    with running(tmp_path) as (kept, troubles):
        kept.record(told("anew"))
        until(lambda: troubles)
        until(lambda: messages(kept) == ["anew"])
    assert len(list(tmp_path.glob("*.broken-*[0-9]"))) == 1
    assert len(troubles) == 1


@pytest.mark.parametrize(
    "change",
    [
        "severity = 99",
        "at = 9e99",
        "at = 'then'",
        "monotonic = 9e999",
        "numbers = '{'",
        "numbers = '[1]'",
        "numbers = '{\"a\":{}}'",
        "message = x'00'",
        "generation = 'x'",
    ],
)
def test_rows_that_are_damaged_hide_no_others(tmp_path: Path, change: str) -> None:
    filled(tmp_path, 5).close()
    with closing(sqlite3.connect(tmp_path / history_store.FILE)) as connection:
        connection.execute(f"UPDATE events SET {change} WHERE id IN (2, 5)")
        connection.commit()
    page = Reader(tmp_path / history_store.FILE).page(None, None, 0, 3)
    assert ([event.id for event in page.events], page.more) == ([1, 3, 4], False)


def test_a_text_that_is_damaged_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    filled(tmp_path, 2).close()
    with closing(sqlite3.connect(tmp_path / history_store.FILE)) as connection:
        connection.execute("UPDATE events SET message = CAST(x'61ff62' AS TEXT) WHERE id = 2")
        connection.commit()
    assert Reader(tmp_path / history_store.FILE).page(None, None, 1, 3).events[0].message == "a\ufffdb"


def test_a_recording_that_is_damaged_is_told_as_such(tmp_path: Path) -> None:
    with closing(filled(tmp_path, 1)) as kept:
        kept.observe(NODE, POLL, 1.0)
    for data in ("'x'", "x'00'", f"x'{zlib.compress(b'[]').hex()}'", f"x'{zlib.compress(b'{}').hex()}'"):
        with closing(sqlite3.connect(tmp_path / history_store.FILE)) as connection:
            connection.execute(f"UPDATE observations SET data = {data}")
            connection.commit()
        with pytest.raises(codec.DecodeError, match="a recording is damaged"):
            list(Reader(tmp_path / history_store.FILE).recordings())


def test_only_the_newest_broken_ones_are_kept(tmp_path: Path) -> None:
    path = tmp_path / history_store.FILE
    for n in range(4):
        path.write_text(str(n))
        path.with_name(f"{path.name}-wal").write_text(str(n))
        set_aside(path)
    found = sorted(tmp_path.glob("*.broken-*"))
    assert [file.read_text() for file in found] == ["2", "2", "3", "3"]
    assert [file.name.endswith("-wal") for file in found] == [False, True, False, True]


def damage(path: Path) -> None:
    """Overwrite every page but the first two."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(8192)
        file.write(b"\xa5" * (size - 8192))


def test_a_damaged_file_is_found_by_a_reader_and_kept_aside(tmp_path: Path) -> None:
    filled(tmp_path, 2000).close()
    damage(tmp_path / history_store.FILE)
    with running(tmp_path) as (kept, troubles):
        with pytest.raises(UnreadableError, match="malformed"):
            kept.page(None, None, None, 1000)
        kept.record(told("anew"))
        until(lambda: troubles)
        until(lambda: messages(kept) == ["anew"])
        assert kept.page(None, None, 2000, 10).events[0].message == "anew", "followers go on"
    assert "damaged" in troubles[0] or "malformed" in troubles[0]


def test_a_sound_file_is_not_given_up_for_a_suspicion(tmp_path: Path) -> None:
    with closing(filled(tmp_path, 5)) as kept:
        kept._writer.suspect()
        kept.record(told("6"))
        until(lambda: len(messages(kept)) == 6)
    assert not list(tmp_path.glob("*.broken-*"))


def test_a_file_that_is_removed_is_made_anew(tmp_path: Path) -> None:
    with running(tmp_path) as (kept, troubles):
        kept.record(told("1"))
        kept.wait(0, 20)
        for path in tmp_path.iterdir():
            path.unlink()
        kept.observe(NODE, POLL, 1.0)
        kept.record(told("2"))
        until(partial(has, kept, "2"))
        assert messages(kept) == ["2"]
        kept.observe(NODE, POLL, 2.0)
    assert [text.partition(":")[0] for text in troubles] == [
        f"cannot write {tmp_path / history_store.FILE}",
        f"{tmp_path / history_store.FILE} can be written again",
    ]
    assert len(list(Reader(tmp_path / history_store.FILE).recordings())) == 1


def test_a_file_that_is_replaced_is_left_to_whoever_did_that(tmp_path: Path) -> None:
    path = tmp_path / history_store.FILE
    with running(tmp_path) as (kept, troubles):
        kept.record(told("1"))
        kept.wait(0, 20)
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("VACUUM INTO ?", (str(tmp_path / "copy"),))
        (tmp_path / "copy").replace(path)
        kept.record(told("2"))
        until(partial(has, kept, "2"))
        assert messages(kept) == ["1", "2"]
    assert "removed or replaced" in troubles[0]


class Full:
    """Makes writing fail, as a full disk does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on = True
        real = Store.write

        def write(this: Store, rows: Rows) -> None:
            if self.on:
                raise sqlite3.OperationalError("database or disk is full")
            real(this, rows)

        monkeypatch.setattr(Store, "write", write)


def test_a_full_disk_is_said_once_and_costs_nothing_if_it_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Full(monkeypatch)
    with running(tmp_path) as (kept, troubles):
        for n in range(20):
            kept.record(told(str(n)))
            kept.observe(NODE, POLL, float(n))
        until(lambda: troubles)
        time.sleep(0.1)  # several tries
        assert len(troubles) == 1
        assert "database or disk is full; supervision goes on" in troubles[0]
        full.on = False
        until(lambda: len(messages(kept)) == 20)
    assert len(troubles) == 2
    assert troubles[1].endswith("can be written again")
    [recording] = Reader(tmp_path / history_store.FILE).recordings()
    assert len(recording.seen) == 20


def test_what_is_lost_is_counted_and_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Full(monkeypatch)
    with running(tmp_path) as (kept, troubles):
        kept.record(told("first"))
        until(lambda: troubles)
        started = time.perf_counter()
        for n in range(history.QUEUE_MAX + 50):
            kept.observe(replace(NODE, pid=n), POLL, float(n))
        for n in range(2000):
            kept.record(told(str(n)))
        assert time.perf_counter() - started < 5, "the loop never waits"
        events_kept = history.QUEUE_MAX - history.SEEN_MAX
        full.on = False
        until(lambda: "history_lost" in [event.kind for event in kept.page(None, None, None, 1000).events])
        kept.observe(NODE, POLL, 1e6)
        lost = [event for event in kept.page(None, None, None, 1000).events if event.kind == "history_lost"]
        assert len(lost) == 1
        missing = (
            f"{2000 - events_kept} events and {history.QUEUE_MAX + 50 - history.SEEN_MAX} observations are missing"
        )
        assert lost[0].message.startswith(missing)
        assert lost[0].severity is Severity.WARNING
    assert [text for text in troubles if "missing in the history" in text] == [lost[0].message]
    recordings = list(Reader(tmp_path / history_store.FILE).recordings())
    assert [r.seen[-1][0] for r in recordings] == [history.SEEN_MAX - 1.0, 1e6], "a gap begins a recording"


def test_closing_on_a_full_disk_is_bounded_and_says_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Full(monkeypatch)
    monkeypatch.setattr(history_writer, "RETRY_S", 60.0)
    with running(tmp_path) as (kept, troubles):
        kept.record(told())
        kept.observe(NODE, POLL, 1.0)
        until(lambda: troubles)
        started = time.monotonic()
        kept.close(20)
        assert time.monotonic() - started < 10
    assert "1 events and 1 observations are missing in the history" in troubles[-1]


def test_a_really_full_disk(tmp_path: Path) -> None:
    """A limit on the size of files stands for the end of the disk."""
    code = (
        "import resource, signal, sys, time\n"
        "from pathlib import Path\n"
        "from supervisord import history, history_writer\n"
        "from supervisord.core.messages import Record\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "history.GATHER_S = history_writer.RETRY_S = 0.02\n"
        "history_writer.SETTLED_S = 0.5\n"
        "troubles = []\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, resource.RLIM_INFINITY))\n"
        "kept = history.History(Path(sys.argv[1]), troubles.append)\n"
        "end = time.monotonic() + 20\n"
        "n = 0\n"
        "while not troubles and time.monotonic() < end:\n"
        "    kept.record(Record('x', f'{n} ' + 'y' * 2000, engine='a'))\n"
        "    n += 1\n"
        "    time.sleep(0.002)\n"
        "time.sleep(0.2)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "while len(troubles) < 2 and time.monotonic() < end:\n"
        "    kept.record(Record('x', 'z', engine='a'))\n"
        "    n += 1\n"
        "    time.sleep(0.05)\n"
        "kept.close(20)\n"
        "print(n, *troubles, sep='\\n')\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    count, first, second = found.stdout.splitlines()
    assert first.startswith("cannot write ")
    assert second.endswith(" can be written again")
    assert query(tmp_path, "SELECT count(*) FROM events") == [(int(count),)], "nothing is lost"
    assert query(tmp_path, "PRAGMA integrity_check") == [("ok",)]


def test_a_directory_that_is_gone(tmp_path: Path) -> None:
    with running(tmp_path / "none") as (kept, troubles):
        kept.record(told())
        until(lambda: troubles)
        with pytest.raises(UnreadableError, match="No such file or directory"):
            kept.page(None, None, None, 10)


def test_one_that_cannot_be_renamed_is_trouble_not_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / history_store.FILE
    path.write_bytes(b"no database at all" * 100)

    def refuse(_: Path) -> Path:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(history_writer, "set_aside", refuse)
    with running(tmp_path) as (kept, troubles):
        kept.record(told())
        until(lambda: troubles)
        assert "cannot be renamed: Permission denied" in troubles[0]
        path.unlink()
        until(partial(has, kept, "a is ready"))


def test_a_disk_that_breaks_every_file_gets_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise BrokenError("bad disk")

    monkeypatch.setattr(Store, "write", broken)
    with running(tmp_path) as (kept, troubles):
        kept.record(told())
        until(lambda: len(troubles) == 2)
        time.sleep(0.2)  # several tries
        assert len(troubles) == 2
    assert troubles[1].startswith(f"cannot write {tmp_path / history_store.FILE}: bad disk, again; ")
    assert len(list(tmp_path.glob("*.broken-*[0-9]"))) == 1


def test_pruning_that_fails_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_writer, "PRUNE_EVERY_S", 0.0)
    errors = [BrokenError("odd"), sqlite3.OperationalError("disk I/O error"), RuntimeError("a bug")]

    def prune(*_: object) -> None:
        if errors:
            raise errors.pop()

    monkeypatch.setattr(Store, "prune", prune)
    with running(tmp_path) as (kept, troubles):
        for n in map(str, range(6)):
            kept.record(told(n))
            until(partial(has, kept, n))
        until(lambda: not errors)
        assert [text for text in messages(kept) if text.isdigit()] == [str(n) for n in range(6)]
    assert len(troubles) == 1
    assert "internal error: RuntimeError: a bug" in troubles[0]


def test_a_bug_in_it_is_said_and_goes_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path) as (kept, troubles):
        kept.observe(NODE, Due("tea"), 1.0)  # type: ignore[arg-type]
        until(lambda: troubles)
        assert "0 events and 1 observations are missing" in troubles[0]
        assert "internal error: Due: cannot " in troubles[0]
        kept.observe(NODE, POLL, 2.0)
        monkeypatch.setattr(codec, "encode_observation", lambda _: 1 / 0)
        kept.observe(NODE, POLL, 3.0)
        until(lambda: kept._losses._seen)
        monkeypatch.undo()
        kept.record(told("goes on"))
        until(partial(has, kept, "goes on"))


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_the_loop_pays_microseconds(tmp_path: Path) -> None:
    sample = Sampled("a", 1, Sample(at=1.0, running=1, waiting=0))
    node = Node(spec=NodeSpec())
    with running(tmp_path) as (kept, _):
        costs = []
        for _ in range(20):
            started = time.perf_counter()
            for n in range(50):
                kept.observe(node, sample, float(n))
            costs.append((time.perf_counter() - started) / 50)
            time.sleep(0.02)
    assert min(costs) < 100e-6
