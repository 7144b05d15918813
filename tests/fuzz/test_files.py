"""What earlier daemons left: node.json, identity records, applied.json, flags, recordings, the history's database."""

from __future__ import annotations

import contextlib
import json
import os
import random
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from supervisord import applied
from supervisord.config import ConfigError, parse
from supervisord.core import codec, durable
from supervisord.core.codec import DecodeError
from supervisord.core.messages import Exited, Record, Severity
from supervisord.core.model import Engine, Node
from supervisord.core.spec import EngineSpec, NodeSpec
from supervisord.engine import flags
from supervisord.engine.flags import _Installation, _load
from supervisord.history_answers import stamp
from supervisord.history_read import Reader, UnreadableError, document
from supervisord.history_rows import Losses, Packer, Seen, Told
from supervisord.history_store import BrokenError, Limits, Store
from supervisord.history_writer import Writer
from supervisord.launcher import records
from supervisord.launcher.records import RecordError
from supervisord.state import StateFile, boot_id
from tests.fuzz.trying import bounded, fuzz, json_bytes, mutated, mutated_json

SPEC: Final = NodeSpec(
    engines={"a": EngineSpec(name="a", model="org/a", port=8000), "b": EngineSpec(name="b", model="/m", port=8001)}
)
ENGINE: Final = {
    "generation": 7, "wanted": True, "plan_id": "p", "good_plan_id": "p", "warm_generation": 7, "good_blocks": 4000,
    "shortfall_retried": False, "replacing": False, "refused_claim": ["p", 0.9], "failures": 2,
    "devices": ["GPU-1"], "devices_generation": 7,
    "restart_times": [10.0, 20.5], "failed": {"kind": "crash_loop", "message": "m"}, "state": "ready",
    "since": 30.0, "after": "restart",
    "last_exit": {"class": "crash", "code": 1, "signal": None, "at": 25.0, "generation": 6, "advice": "x"},
    "cause": {"code": "operator", "message": "m"}, "ready_since": 40.0, "app_xids": ["x"],
    "warmup": {"first_ms": 1.5, "settled_ms": 1, "rounds": 3, "problem": None, "memory_bytes": 1, "gpu_bytes": 2,
    "took_s": 3.5},
    "memory": {"asleep": False, "host": 1, "gpu": 2},
}  # fmt: skip
GPU: Final = {"pci_id": "0000:1b:00.0", "index": 0, "name": "H200", "code": "gpu_fault", "message": "m"}
STATE: Final = {"version": 1, "boot_id": boot_id(), "engines": {"a": ENGINE, "b": ENGINE}, "gpus": {"GPU-1": GPU}}


@fuzz(250, slow=2)
def test_state(rng: random.Random) -> None:
    data = json_bytes([STATE], rng)
    with bounded("node.json", data):
        _restored(data)


def _restored(data: bytes) -> None:
    path = FOLDER / "node.json"
    path.write_bytes(data)
    told: list[str] = []
    file = StateFile(FOLDER, told.append)
    saved, same_boot = file.load()
    spawned = dict.fromkeys(SPEC.engines, 3)
    engines = durable.restore(SPEC, {"a": "p", "b": "q"}, saved, 1000.0, same_boot=same_boot, spawned=spawned)
    gpus = durable.restore_gpus(file.gpus)
    node = Node(spec=SPEC, engines=engines, gpus=gpus)
    assert all(type(engine) is Engine and engine.generation >= 3 for engine in engines.values())
    again = json.loads(json.dumps(durable.save(node), allow_nan=False))
    back = durable.restore(SPEC, {"a": "p", "b": "q"}, again, 1000.0, same_boot=True, spawned=spawned)
    assert {name: engine.generation for name, engine in back.items()} == {n: e.generation for n, e in engines.items()}
    codec.decode_node(json.loads(json.dumps(codec.encode_node(node), allow_nan=False)))
    file.save(durable.save(node), gpus=durable.save_gpus(node))
    assert len(told) <= 1
    assert all(text.isprintable() and len(text) < 1000 for text in told)


RECORD: Final = {
    "version": 1, "engine": "a", "generation": 3, "plan_id": "p", "uid": 1000, "pid": 4711, "start_ticks": 99,
    "boot_id": "b",
    "private_dir": "/var/lib/vllm-supervisor/tmp/a.3", "log_offset": 10,
}  # fmt: skip
LATER: Final = ({"shared_memory": {"psm_1": 5}}, {"log_offset": 0}, {"ended": True})


@fuzz(600)
def test_identity_records(rng: random.Random) -> None:
    lines = [json_bytes([RECORD], rng) if rng.random() < 0.7 else json.dumps(RECORD).encode()]
    lines += [json_bytes(LATER, rng) for _ in range(rng.randrange(4))]
    data = b"\n".join(lines)
    with bounded("identity record", data):
        try:
            record = records.parse("a", data)
        except RecordError as error:
            assert len(str(error)) < 200
            return
        assert 0 <= record.process.pid < 2**31
        with contextlib.suppress(OSError):  # a name may be too long; anything else would be a traceback
            os.lstat(record.private_dir)
        for name, inode in record.shared_memory.items():
            assert Path(name).name == name
            assert 0 <= inode < 2**63


TABLES: Final = {
    "supervisor": {"listen": "127.0.0.1:9401", "state_dir": "/var/lib/x"},
    "gpu": {"persistence": "auto", "persistence_override": {"H200*": "on"}},
    "engine_defaults": {"args": {"max_num_seqs": 4}, "slo": {"ttft_p95_ms": 3}},
    "engine": {
        "a": {
            "model": "org/a", "port": 8000, "gpus": ["GPU-1234", 0], "command": ["/v/vllm", "serve"], "host": "::1",
            "args": {"max-model-len": 8192, "x": [1, "2"], "o": {"k": [1, {"l": "m"}]}}, "env": {"A": "b"},
            "warmup": {"prime": ["/p"]}, "restart": {"maintenance_window": "0 3 * * sun 2h", "backoff_max_s": 2.5},
        }
    },
    "notify": {"n": {"url": "https://h/x", "events": ["problems"], "headers_file": "/h"}},
}  # fmt: skip


@fuzz(300)
def test_applied(rng: random.Random) -> None:
    data = json_bytes([{"version": 1, "config": "/etc/config.toml", "tables": TABLES}], rng)
    with bounded("applied.json", data), contextlib.suppress(applied.UnusableError):
        (FOLDER / "applied.json").write_bytes(data)
        found = applied.read(FOLDER, Path("/etc/config.toml"))
        assert found is None or isinstance(found, NodeSpec)
    changed = mutated_json(TABLES, rng)
    with bounded("tables", changed):
        try:
            parse(changed)
        except ConfigError as error:
            assert all(str(problem).isprintable() for problem in error.problems), str(error)


PLACE: Final = _Installation("/opt/vllm/bin/vllm", "0.32.0", "1 2 3")
KEPT: Final = {
    "format": 1, "program": PLACE.program, "version": PLACE.version, "state": PLACE.state,
    "flags": {name: [name, "one", False, []] for name in flags._EVERY_RELEASE} | {"x": ["x", "several", True, ["a"]]},
}  # fmt: skip


@fuzz(300)
def test_flags_that_were_kept(rng: random.Random) -> None:
    data = json_bytes([KEPT], rng)
    with bounded("flags cache", data):
        path = FOLDER / "flags.json"
        path.write_bytes(data)
        found = _load(path, PLACE)
        assert found is None or found.get("host") is not None


SEEN: Final = [
    codec.encode_observation(Exited("a", 3, 1, None, tail=("x", "y"))),
    codec.encode_node(Node(spec=SPEC)),
]


@fuzz(300)
def test_recordings(rng: random.Random) -> None:
    value = mutated_json(rng.choice(SEEN), rng)
    with bounded("recording", value):
        for decode in (codec.decode_node, codec.decode_observation):
            try:
                decode(value)
            except DecodeError as error:
                assert len(str(error)) < 100_000


# --- the database -----------------------------------------------------------------------------------------------------


def _database() -> bytes:
    """A history with something of everything."""
    path = FOLDER / "seed.sqlite3"
    store = Store(path, Limits())
    packer = Packer("boot", Losses())
    node = Node(spec=SPEC)
    items: list[Seen | Told] = [Seen(node, Exited("a", 3, 1, None, tail=("x",)), 1.0, after_gap=True)]
    for at in range(60):
        record = Record(
            "exited", f"engine a exited {at}", Severity.ERROR, "a", 3, "exited", {"code": at, "text": "x" * 90}
        )
        items.append(Told(record, 1e9 + at, float(at)))
    store.write(packer.pack(items, last=True))
    store.close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = DELETE")
    connection.close()
    return path.read_bytes()


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    global FOLDER, DATABASE  # noqa: PLW0603 (what is tried is no fixture of a function)
    FOLDER = tmp_path_factory.mktemp("state")
    DATABASE = _database()


FOLDER: Path
DATABASE: bytes

_VALUES: Final = (
    "NULL",
    "''",
    "'x'",
    "-1",
    "9223372036854775807",
    "1e308",
    "9e999",
    "x'ff00'",
    "CAST(x'ff80' AS TEXT)",
    "'9' || hex(zeroblob(3000))",
    "'[' ",
    "'{}'",
    "'[1]'",
)
_STATEMENTS: Final = (
    "UPDATE {table} SET {column} = {value}",
    "UPDATE {table} SET {column} = {value} WHERE rowid % 3 = 0",
    "DELETE FROM {table}",
    "DROP TABLE {table}",
    "ALTER TABLE {table} RENAME COLUMN {column} TO other",
    "CREATE TABLE {table} (id)",
    "CREATE VIEW {table} AS SELECT 1",
    "CREATE TRIGGER t BEFORE INSERT ON {table} BEGIN SELECT RAISE(ABORT, 'no'); END",
    "UPDATE sqlite_sequence SET seq = {value}",
    "PRAGMA user_version = {small}",
    "CREATE UNIQUE INDEX u ON {table} ({column})",
)  # fmt: skip
_COLUMNS: Final = {
    "events": ("id", "at", "boot_id", "monotonic", "severity", "kind", "engine", "generation", "reason", "message",
    "numbers"),
    "observations": ("id", "at", "boot_id", "has_node", "data"),
}  # fmt: skip


def _rewritten(path: Path, rng: random.Random) -> str:
    """Change what is in the tables and what they are; give the statements."""
    done = []
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA ignore_check_constraints = ON")
    connection.execute("PRAGMA writable_schema = ON")
    if rng.random() < 0.5:  # a file may say that nothing has to be there, or of a kind
        for old in (" NOT NULL", " REAL", " INTEGER"):
            connection.execute("UPDATE sqlite_schema SET sql = replace(sql, ?, '') WHERE name = 'events'", (old,))
        connection.close()
        connection = sqlite3.connect(path, isolation_level=None)
    for _ in range(rng.randint(1, 3)):
        table = rng.choice(tuple(_COLUMNS))
        words = {
            "table": table,
            "column": rng.choice(_COLUMNS[table]),
            "value": rng.choice(_VALUES),
            "small": rng.choice((0, 1, 2, -1)),
        }
        statement = rng.choice(_STATEMENTS[:2] if rng.random() < 0.6 else _STATEMENTS).format(**words)
        done.append(statement)
        try:
            connection.execute(statement)
        except sqlite3.Error:
            continue
    connection.close()
    return "; ".join(done)


def _read_all(path: Path) -> None:
    """Everything that reads the file, in the words that callers know."""
    reader = Reader(path)
    asks: list[Callable[[], object]] = [
        lambda: [
            json.dumps(document(event, stamp(event.at)), allow_nan=False)
            for event in reader.page(None, None, None, 100).events
        ],
        lambda: [stamp(event.at) for event in reader.page("a", None, 0, 7).events],
        lambda: reader.page(None, 1e9 + 5, None, 3),
        lambda: reader.knows("a"),
    ]
    for ask in asks:
        try:
            ask()
        except (UnreadableError, BrokenError):
            continue
    with contextlib.suppress(UnreadableError, BrokenError, DecodeError):
        list(reader.recordings())


@fuzz(100, slow=8)
def test_history(rng: random.Random) -> None:
    path = FOLDER / "history.sqlite3"
    for left in FOLDER.glob("history.sqlite3*"):
        left.unlink()
    rewritten = rng.random() < 0.5
    data = DATABASE if rewritten else mutated([DATABASE], rng)
    path.write_bytes(data)
    what = _rewritten(path, rng) if rewritten else ""
    with bounded("history", what.encode() + data):
        _read_all(path)
        told: list[str] = []
        closing = threading.Event()
        closing.set()
        writer = Writer(path, Limits(), closing, told.append, lambda: None)
        event = Packer("boot", Losses()).pack([Told(Record("a", "b"), 1e9, 1.0)])
        writer.suspect()
        writer.write(event)
        writer._prune_at = 0.0
        writer.prune()
        writer.write(event)
        writer.close()
        _read_all(path)
