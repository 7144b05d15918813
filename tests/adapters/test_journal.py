"""journald's native protocol, against a datagram socket of our own and, where it can be run, against journald."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisord.core.kinds import KINDS, UNSENT
from supervisord.core.messages import Record, Severity
from supervisord.log import Journal, Sent
from supervisord.systemd import journal
from supervisord.systemd.journal import JournalSocket, encode
from supervisord.systemd.message_ids import MESSAGE_IDS

ROOT = Path(__file__).parents[2]
CATALOG = ROOT / "packaging" / "vllm-supervisor.catalog"
JOURNALD = Path("/lib/systemd/systemd-journald")

RESTART = Record(
    "restart", "qwen is started again", Severity.WARNING, "qwen", 3, "exited", {"delay_s": 1.5, "x": None, "gpu": "G-1"}
)


class Receiver:
    """What journald is to a client."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.settimeout(20)

    def entry(self) -> dict[str, str]:
        data, ancillary, _, _ = self.socket.recvmsg(1 << 20, socket.CMSG_SPACE(4))
        for _level, _kind, packed in ancillary:
            assert data == b""
            (fd,) = struct.unpack("@i", packed)
            with os.fdopen(fd, "rb") as file:
                with pytest.raises(OSError, match="not permitted"):
                    os.ftruncate(fd, 0)  # sealed: journald maps it
                file.seek(0)
                data = file.read()
        return parse(data)

    def leave(self) -> None:
        self.socket.close()
        self.path.unlink()


def parse(data: bytes) -> dict[str, str]:
    """An entry, as strictly as journald: each field once here."""
    fields: list[tuple[bytes, bytes]] = []
    while data:
        line, _, rest = data.partition(b"\n")
        name, assigned, value = line.partition(b"=")
        if not assigned:
            (length,) = struct.unpack_from("<Q", rest)
            value, rest = rest[8 : 8 + length], rest[8 + length :]
            assert rest[:1] == b"\n"
            rest = rest[1:]
        assert re.fullmatch(rb"[A-Z][A-Z0-9_]{0,63}", name), name
        fields.append((name, value))
        data = rest
    assert len({name for name, _ in fields}) == len(fields)
    return {name.decode(): value.decode() for name, value in fields}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "socket"


@pytest.fixture
def receiver(place: Path) -> Iterator[Receiver]:
    made = Receiver(place)
    yield made
    made.socket.close()


# --- what is sent -----------------------------------------------------------------------------------------------------


def test_fields(receiver: Receiver) -> None:
    written = Journal(sink=JournalSocket(receiver.path))
    written.write(RESTART)
    written.tell("daemon_started", "runs")
    written.close()
    assert receiver.entry() == {
        "MESSAGE": "qwen is started again",
        "PRIORITY": "4",
        "SYSLOG_IDENTIFIER": "vllm-supervisor",
        "SYSLOG_FACILITY": "3",
        "VLLM_DELAY_S": "1.5",
        "VLLM_GPU": "G-1",
        "VLLM_ENGINE": "qwen",
        "VLLM_GENERATION": "3",
        "VLLM_REASON": "exited",
        "VLLM_EVENT": "restart",
        "MESSAGE_ID": MESSAGE_IDS["restart"],
    }
    assert receiver.entry() == {
        "MESSAGE": "runs",
        "PRIORITY": "6",
        "SYSLOG_IDENTIFIER": "vllm-supervisor",
        "SYSLOG_FACILITY": "3",
        "VLLM_EVENT": "daemon_started",
        "MESSAGE_ID": MESSAGE_IDS["daemon_started"],
    }


def test_lines_stay_one_value() -> None:
    told = "internal error\nTraceback:\n\tFile x\nPRIORITY=0\n"
    assert parse(encode(Record("bug", told)))["MESSAGE"] == "internal error\nTraceback:\n File x\nPRIORITY=0\n"


def test_what_came_from_outside_forges_nothing() -> None:
    fields = {"what an\x00 engine=said": "a\nMESSAGE=b\x1b[2J", "x" * 99: "\udcff"}
    entry = parse(encode(Record("no such kind", "bad \x1b[2J\x00 \u202e \r text", engine="a\nb", numbers=fields)))
    assert entry["MESSAGE"] == "bad  [2J      text"
    assert entry["VLLM_ENGINE"] == "a\nb"
    assert entry["VLLM_WHAT_AN__ENGINE_SAID"] == "a\nMESSAGE=b [2J"
    assert entry["VLLM_" + "X" * 59] == " "
    assert "MESSAGE_ID" not in entry


def test_names_of_numbers_do_not_replace_what_the_entry_is_about() -> None:
    entry = parse(encode(Record("exited", "x", engine="a", numbers={"engine": "b", "event": "c"})))
    assert (entry["VLLM_ENGINE"], entry["VLLM_EVENT"]) == ("a", "exited")


@pytest.mark.parametrize("size", [100_000, 3_000_000])
def test_large_messages(receiver: Receiver, size: int) -> None:
    text = "ü" + "x" * size + "\nlast line"
    sink = JournalSocket(receiver.path)
    assert sink.send(Record("bug", text)) is Sent.TAKEN
    assert sink.send(RESTART) is Sent.TAKEN
    sink.close()
    assert receiver.entry()["MESSAGE"] == text
    assert receiver.entry()["VLLM_EVENT"] == "restart"


# --- journald that is slow, away, or comes back -----------------------------------------------------------------------


def test_a_full_queue_costs_lines_not_time(receiver: Receiver) -> None:
    written = Journal(sink=JournalSocket(receiver.path))
    began = time.monotonic()
    for i in range(5000):
        written.tell("x", f"line {i}")
    assert time.monotonic() - began < 5
    assert written.dropped > 2000
    texts = [receiver.entry()["MESSAGE"] for _ in range(5001 - written.dropped)]
    written.close()
    assert texts[-1] == f"{written.dropped} log lines were dropped: journald was away, or too slow"
    numbers = [int(text.removeprefix("line ")) for text in texts[:-1]]
    assert numbers == sorted(set(numbers))


def test_one_that_restarts_loses_nothing(receiver: Receiver) -> None:
    written = Journal(sink=JournalSocket(receiver.path))
    written.tell("x", "before")
    assert receiver.entry()["MESSAGE"] == "before"
    receiver.socket.close()  # the file is still there: ECONNREFUSED
    written.tell("x", "meanwhile")
    time.sleep(0.05)
    receiver.path.unlink()  # ENOENT
    written.tell("x", "also")
    time.sleep(journal.WAIT_S)
    second = Receiver(receiver.path)
    assert [second.entry()["MESSAGE"] for _ in range(2)] == ["meanwhile", "also"]
    written.tell("x", "after")
    assert second.entry()["MESSAGE"] == "after"
    written.close()
    assert written.dropped == 0
    second.socket.close()


def test_away_for_long(place: Path) -> None:
    written = Journal(sink=JournalSocket(place))
    for i in range(3000):
        written.tell("x", f"line {i}")
    assert written.dropped >= 999
    back = Receiver(place)
    texts = [back.entry()["MESSAGE"] for _ in range(3001 - written.dropped)]
    assert texts[0] == "line 0"
    assert texts[-1] == f"{written.dropped} log lines were dropped: journald was away, or too slow"
    written.close()
    back.socket.close()


def test_losses_are_said_to_one_that_takes_them(receiver: Receiver) -> None:
    class Refusing(JournalSocket):
        refuses = True

        def send(self, record: Record) -> Sent:
            self.refuses = self.refuses and record.message != "c"
            return Sent.LOST if self.refuses else super().send(record)

    written = Journal(sink=Refusing(receiver.path))
    for text in ("a", "b", "c"):
        written.tell("x", text)
    written.close()
    lost = "2 log lines were dropped: journald was away, or too slow"
    assert [receiver.entry()["MESSAGE"] for _ in range(2)] == ["c", lost]


def test_the_end_does_not_wait_for_one_that_is_away(place: Path) -> None:
    written = Journal(sink=JournalSocket(place))
    for i in range(3000):
        written.tell("x", f"line {i}")
    began = time.monotonic()
    written.close(timeout_s=0.3)
    assert time.monotonic() - began < 20
    written._thread.join(20)
    assert not written._thread.is_alive()


def test_waiting_for_one_that_hangs_uses_no_cpu(receiver: Receiver) -> None:
    sink = JournalSocket(receiver.path)
    while sink.send(RESTART) is Sent.TAKEN:
        pass
    began, cpu = time.monotonic(), time.thread_time()
    assert sink.send(RESTART) is Sent.LATER
    assert journal.WAIT_S * 0.8 <= time.monotonic() - began < journal.WAIT_S * 10
    assert time.thread_time() - cpu < journal.WAIT_S / 5
    sink.close()


def test_what_cannot_be_sent_at_all_is_lost(place: Path) -> None:
    sink = JournalSocket(place.with_name("x" * 200))  # longer than an address may be
    assert sink.send(RESTART) is Sent.LOST
    sink.close()


# --- when it is used --------------------------------------------------------------------------------------------------


def test_only_where_journald_reads_stderr(receiver: Receiver, tmp_path: Path) -> None:
    with (tmp_path / "stderr").open("w") as stream:
        found = os.fstat(stream.fileno())
        ours = {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
        sink = journal.connect(stream, ours, receiver.path)
        assert sink is not None
        sink.close()
        assert journal.connect(stream, {}, receiver.path) is None
        assert journal.connect(stream, {"JOURNAL_STREAM": "1:2"}, receiver.path) is None
        assert journal.connect(stream, {"JOURNAL_STREAM": "nonsense"}, receiver.path) is None
        assert journal.connect(stream, ours, tmp_path / "none") is None
        assert journal.connect(io.StringIO(), ours, receiver.path) is None
    assert journal.connect(stream, ours, receiver.path) is None


# --- ids and catalog --------------------------------------------------------------------------------------------------


def told() -> dict[str, list[set[str]]]:
    """Every kind of event in the source, with the fields that each place which tells it is sure to send."""
    kinds: dict[str, list[set[str]]] = {}
    for path in Path(journal.__file__).parents[1].rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for call in ast.walk(function):
                    if isinstance(call, ast.Call):
                        for kind in kinds_of(call, function):
                            kinds.setdefault(kind, []).append(fields_of(call))
    return kinds


def kinds_of(call: ast.Call, within: ast.AST) -> list[str]:
    """Of `turn.record(kind, ...)`, `voice.tell(kind, ...)`, `Record(kind, ...)`; a variable: all that it may be."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name not in {"record", "tell", "Record"} or not call.args:
        return []
    kind = call.args[0]
    values = [kind]
    if isinstance(kind, ast.Name):
        assigned = [node for node in ast.walk(within) if isinstance(node, ast.Assign)]
        values = [node.value for node in assigned if ast.unparse(node.targets[0]) == kind.id]
    values = [
        one for value in values for one in ([value.body, value.orelse] if isinstance(value, ast.IfExp) else [value])
    ]
    found = [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    # history.record(record) hands on what was told elsewhere; the core alone computes kinds.
    assert found or name != "record" or ast.unparse(call.func) != "turn.record", f"of what kind is {ast.unparse(call)}?"
    return found


def fields_of(call: ast.Call) -> set[str]:
    sure = {f"VLLM_{word.arg.upper()}" for word in call.keywords if word.arg not in {None, "severity"}}
    of_engine = len(call.args) > 1 and not isinstance(call.args[1], ast.Constant | ast.JoinedStr)
    return sure | ({"VLLM_ENGINE"} if of_engine else set())


def catalog() -> dict[str, str]:
    """Entries by id. Their form: systemd's docs/CATALOG.md."""
    text = CATALOG.read_text(encoding="utf-8")
    blocks = re.split(r"^-- (.*)\n", text, flags=re.MULTILINE)
    ids, entries = blocks[1::2], blocks[2::2]
    assert len(ids) == len(set(ids))
    for entry in entries:
        head = r"Subject: \S.*\nDefined-By: vllm-supervisor\nSupport: \S+\n\n"
        assert re.match(head, entry), entry
    return {one: re.sub(r"^#.*\n", "", entry, flags=re.MULTILINE) for one, entry in zip(ids, entries, strict=True)}


def test_every_kind_has_an_id_of_its_own() -> None:
    assert sorted(told()) == sorted(MESSAGE_IDS)
    assert MESSAGE_IDS.keys() == KINDS | UNSENT, "each is in one group of core/kinds.py"
    assert len(set(MESSAGE_IDS.values())) == len(MESSAGE_IDS)
    for one in MESSAGE_IDS.values():
        assert re.fullmatch(r"[0-9a-f]{12}4[0-9a-f]{3}[89ab][0-9a-f]{15}", one)


def test_the_catalog_explains_every_kind_with_fields_that_it_has() -> None:
    entries, places = catalog(), told()
    assert sorted(entries) == sorted(MESSAGE_IDS.values())
    for kind, one in MESSAGE_IDS.items():
        used = set(re.findall(r"@(\w+)@", entries[one]))
        assert entries[one].count("@") == 2 * len(re.findall(r"@\w+@", entries[one]))
        assert used <= set.intersection(*places[kind]), kind


@pytest.mark.skipif(not shutil.which("journalctl"), reason="no journalctl")
def test_the_catalog_compiles(tmp_path: Path) -> None:
    folder = tmp_path / "usr/lib/systemd/catalog"
    folder.mkdir(parents=True)
    shutil.copy(CATALOG, folder)
    made = subprocess.run(
        ["journalctl", "--update-catalog", f"--root={tmp_path}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "unrecognized option" in made.stderr:
        pytest.skip("this journalctl compiles no catalogs")
    assert (made.returncode, made.stderr) == (0, "")
    listed = subprocess.run(
        ["journalctl", "--list-catalog", f"--root={tmp_path}"], capture_output=True, text=True, timeout=60, check=True
    )
    assert {line.split()[0] for line in listed.stdout.splitlines()} == set(MESSAGE_IDS.values())


# --- the real one -----------------------------------------------------------------------------------------------------

ALONE = """
set -e
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/journald.conf.d /run/log/journal
cd /run/systemd/journald.conf.d
printf '%s\\n' '[Journal]' Storage=volatile Audit=no ReadKMsg=no RateLimitIntervalSec=0 > a.conf
mount --bind "$1" /var/lib/systemd/catalog
exec "$2"
"""


class RealJournald:
    """journald in a mount namespace of its own; its socket is seen from outside through /proc/PID/root."""

    def __init__(self, catalogs: Path) -> None:
        argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", ALONE, "sh", str(catalogs), str(JOURNALD)]
        self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.socket = Path(f"/proc/{self.process.pid}/root/run/systemd/journal/socket")
        end = time.monotonic() + 20
        while time.monotonic() < end and self.process.poll() is None and not self.socket.is_socket():
            time.sleep(0.02)
        self.runs = self.socket.is_socket()

    def ask(self, *args: str) -> str:
        argv = ["nsenter", "-t", str(self.process.pid), "--mount", "journalctl", "--no-pager", "--quiet", *args]
        return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False).stdout

    def entries(self, *args: str, count: int) -> list[dict[str, Any]]:
        """It stores what it was sent a moment later."""
        end = time.monotonic() + 20
        while len(lines := self.ask("--output=json", "--all", *args).splitlines()) < count and time.monotonic() < end:
            time.sleep(0.02)
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)


@pytest.fixture
def journald(tmp_path: Path) -> Iterator[RealJournald]:
    if os.geteuid() != 0 or not JOURNALD.exists() or not shutil.which("journalctl") or not shutil.which("nsenter"):
        pytest.skip("needs root, systemd-journald and util-linux")
    source, compiled = tmp_path / "usr/lib/systemd/catalog", tmp_path / "var/lib/systemd/catalog"
    source.mkdir(parents=True)
    shutil.copy(CATALOG, source)
    subprocess.run(["journalctl", "--update-catalog", f"--root={tmp_path}"], timeout=60, check=True)
    made = RealJournald(compiled)
    try:
        if not made.runs:
            pytest.skip("journald does not run in a mount namespace here")
        yield made
    finally:
        made.close()


def test_field_queries_of_journalctl(journald: RealJournald) -> None:
    written = Journal(sink=JournalSocket(journald.socket))
    large = "x" * 500_000 + "\nü"
    written.write(RESTART)
    written.write(Record("bug", "internal error\n  Traceback", Severity.CRITICAL))
    written.write(Record("exited", large, Severity.ERROR, "other", 1, "exited", {"exit_class": "crash"}))
    written.close()
    (one,) = journald.entries("VLLM_ENGINE=qwen", count=1)
    fields = {name: value for name, value in one.items() if not name.startswith("_")}
    assert fields == parse(encode(RESTART))
    assert [entry["VLLM_EVENT"] for entry in journald.entries("-t", "vllm-supervisor", count=3)] == [
        "restart",
        "bug",
        "exited",
    ]
    assert [entry["MESSAGE"] for entry in journald.entries("--priority=crit", count=1)] == [
        "internal error\n  Traceback"
    ]
    assert [entry["MESSAGE"] for entry in journald.entries("VLLM_REASON=exited", "VLLM_ENGINE=other", count=1)] == [
        large
    ]
    explained = journald.ask("-x", f"MESSAGE_ID={MESSAGE_IDS['restart']}")
    assert "Subject: Engine qwen is started again: exited" in explained
    assert "grows with each:        1.5 s" in explained
