"""Identity records and the lock of the state directory: durable, exact, and not to be fooled by broken files."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from supervisord.core.model import Process
from supervisord.launcher.base import StateDirBusy, StateDirError
from supervisord.launcher.records import Record, Records
from supervisord.launcher.statedir import lock_state_dir
from tests.sim.engine import wait_until

RECORD = Record("qwen", 3, "plan-1", 1000, Process(4711, 99, "boot"), "/state/tmp/qwen.3", 120)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path


def written(directory: Path, record: Record = RECORD) -> Path:
    Records(directory).put(record)
    return directory / f"{record.engine}.jsonl"


def load(directory: Path) -> Record:
    records, problems = Records(directory).load()
    assert problems == []
    (record,) = records
    return record


def problem(directory: Path) -> str:
    records, problems = Records(directory).load()
    assert records == []
    (text,) = problems
    return text


def test_a_record_is_read_back(directory: Path) -> None:
    path = written(directory)
    assert load(directory) == RECORD
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [path.name for path in directory.iterdir()] == ["qwen.jsonl"]


def test_a_new_generation_replaces_the_old_one(directory: Path) -> None:
    records = Records(directory)
    records.put(RECORD)
    records.add("qwen", 3, {"ended": True})
    records.put(replace(RECORD, generation=4))
    records.sync("qwen")
    assert load(directory) == replace(RECORD, generation=4)


def test_later_facts_are_added(directory: Path) -> None:
    records = Records(directory)
    records.put(RECORD)
    records.add("qwen", 3, {"shared_memory": {"psm_1": 11, "psm_2": 12}})
    records.add("qwen", 3, {"shared_memory": {"psm_2": 13, "odd\udcff": 14}})
    records.add("qwen", 3, {"log_offset": 0})
    known = {"psm_1": 11, "psm_2": 13, "odd\udcff": 14}
    assert load(directory) == replace(RECORD, shared_memory=known, log_offset=0)
    records.add("qwen", 3, {"ended": True})
    assert load(directory).ended


def test_facts_about_another_generation_are_dropped(directory: Path) -> None:
    records = Records(directory)
    records.put(RECORD)
    records.add("qwen", 2, {"ended": True})
    records.add("other", 3, {"ended": True})
    assert load(directory) == RECORD
    again = Records(directory)
    again.load()
    again.add("qwen", 3, {"ended": True})
    assert load(directory).ended


@pytest.mark.parametrize("later", [b'{"ended": tr', b"\x00\x00\x00", b"[1]\n", b'{"shared_memory": [1]}\n', b"{}\n"])
def test_a_torn_later_line_costs_only_itself(directory: Path, later: bytes) -> None:
    with written(directory).open("ab") as file:
        file.write(later)
    assert load(directory) == RECORD


@pytest.mark.parametrize("length", range(0, 200, 7))
def test_a_half_written_record_is_reported(directory: Path, length: int) -> None:
    path = written(directory)
    os.truncate(path, min(length, path.stat().st_size - 2))
    text = problem(directory)
    assert text.startswith(f"cannot use the identity record {path}: ")
    assert text.endswith("; the next start replaces it")


@pytest.mark.parametrize("data", [b"", b"\0" * 300, bytes(range(256)), b"[]", b"null", b"{}", b"[" * 100_000, b'"x"'])
def test_garbage_is_reported(directory: Path, data: bytes) -> None:
    (directory / "qwen.jsonl").write_bytes(data)
    assert "cannot use the identity record" in problem(directory)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("version", 2, "its version is 2, this program reads 1"),
        ("version", None, "its version is None"),
        ("engine", "other", "it is about engine 'other'"),
        ("pid", "4711", "its pid is '4711'"),
        ("pid", True, "its pid is True"),
        ("pid", -1, "its pid is -1"),
        ("start_ticks", None, "its start_ticks is None"),
        ("boot_id", "", "its boot_id is ''"),
        ("private_dir", 7, "its private_dir is 7"),
        ("private_dir", "/tmp/\0", "its private_dir is '/tmp/"),
        ("private_dir", "/tmp/\ud800", "its private_dir is '/tmp/"),
        ("pid", 2**31, "its pid is 2147483648"),
        ("uid", 2**32 - 1, "its uid is 4294967295"),
        ("start_ticks", 10**4000, "its start_ticks is 1000"),
        ("engine", "x" * 100_000, "it is about engine 'xxx"),
    ],
)
def test_a_wrong_record_is_reported(directory: Path, name: str, value: object, why: str) -> None:
    path = written(directory)
    facts = json.loads(path.read_bytes())
    path.write_text(json.dumps({**facts, name: value}), encoding="utf-8")
    text = problem(directory)
    assert why in text
    assert len(text) < 500


def test_names_of_nothing_in_shared_memory_are_left_alone(directory: Path) -> None:
    names = {
        "psm_1": 5,
        "../../etc/passwd": 6,
        "": 7,
        "a\0": 8,
        "\ud800": 9,
        "psm_2": -1,
        "psm_3": True,
        "psm_4": 2**64,
    }
    with written(directory).open("ab") as file:
        file.write(json.dumps({"shared_memory": names, "log_offset": 2**64}).encode())
    assert load(directory) == replace(RECORD, shared_memory={"psm_1": 5})


def test_many_later_lines_are_read_quickly(directory: Path) -> None:
    with written(directory).open("ab") as file:
        file.writelines(b'{"shared_memory":{"%d":1}}\n' % name for name in range(30_000))
    begun = time.thread_time()
    assert len(load(directory).shared_memory) == 30_000
    assert time.thread_time() - begun < 2.0


def test_one_bad_record_does_not_hide_the_others(directory: Path) -> None:
    written(directory)
    (directory / "a.jsonl").write_bytes(b"?")
    (directory / "z.jsonl").symlink_to("/etc/passwd")
    (directory / "d.jsonl").mkdir()
    records, problems = Records(directory).load()
    assert records == [RECORD]
    assert len(problems) == 3


def test_unfinished_files_are_removed_by_who_may(directory: Path) -> None:
    """A look may be at a directory that anybody named: it changes nothing. Nobody else's file is ever removed."""
    written(directory)
    (directory / ".qwen.jsonl.new").write_bytes(b'{"vers')
    others = ["__init__.py", "client.new", "qwen.jsonl", "sub"]
    for name in others[:2]:
        (directory / name).touch()
    (directory / "sub").mkdir()
    assert load(directory) == RECORD
    assert sorted(path.name for path in directory.iterdir()) == [".qwen.jsonl.new", *others]
    Records(directory).remove_unfinished()
    assert sorted(path.name for path in directory.iterdir()) == others


# --- the lock -------------------------------------------------------------------------------------------------------

HOLD = """
import signal, sys
from pathlib import Path
from supervisord.launcher.statedir import lock_state_dir
with lock_state_dir(Path(sys.argv[1])):
    print('ok', flush=True)
    signal.pause()
"""


def test_a_second_daemon_is_refused_and_told_who_was_first(tmp_path: Path) -> None:
    state = tmp_path / "deep" / "state"
    argv = [sys.executable, "-c", HOLD, str(state)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"ok\n"
        with pytest.raises(StateDirBusy) as caught:
            lock_state_dir(state)
        assert caught.value.pid == first.pid
        assert str(caught.value) == (
            f"cannot use {state}: vllm-supervisor with pid {first.pid} uses it; "
            "stop that one, or set another supervisor.state_dir"
        )
        first.send_signal(signal.SIGKILL)
    with lock_state_dir(state):
        assert int((state / "lock").read_text(encoding="ascii")) == os.getpid()
        with pytest.raises(StateDirBusy):
            lock_state_dir(state)
    with lock_state_dir(state):
        assert stat.S_IMODE(state.stat().st_mode) == 0o711


def test_a_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    with lock_state_dir(tmp_path):
        child = subprocess.Popen(["/bin/sleep", "60"], close_fds=False)
    try:
        wait_until(lambda: is_free(tmp_path), 5, "the lock")
    finally:
        child.kill()
        child.wait()


def is_free(state: Path) -> bool:
    try:
        lock_state_dir(state).close()
    except StateDirBusy:
        return False
    return True


@pytest.mark.parametrize("what", ["file", "link", "read-only"])
def test_a_directory_that_cannot_be_used(tmp_path: Path, what: str) -> None:
    state = tmp_path / "state"
    if what == "file":
        state.touch()
    elif what == "link":
        state.mkdir()
        (state / "lock").symlink_to(tmp_path / "elsewhere")
    else:
        state = Path("/proc/state")
    with pytest.raises(StateDirError, match=rf"^cannot use {state} as supervisor.state_dir: .*free space"):
        lock_state_dir(state)


def test_a_full_disk(tmp_path: Path) -> None:
    # A file-size limit of nothing stands in for the full disk: files can be made, nothing can be written.
    code = (
        "import sys; from pathlib import Path; from supervisord.launcher.statedir import lock_state_dir\n"
        "from supervisord.launcher.base import StateDirError\n"
        "try: lock_state_dir(Path(sys.argv[1]))\nexcept StateDirError as error: print(error)"
    )
    done = subprocess.run(
        ["prlimit", "--fsize=0:0", sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(f"cannot use {tmp_path} as supervisor.state_dir: File too large; ")
