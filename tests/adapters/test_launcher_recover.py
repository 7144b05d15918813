"""What a killed daemon leaves: found by the next one, adopted or ended, never doubled, never mistaken."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from supervisord.core.model import Found, Process
from supervisord.launcher import procfs
from supervisord.launcher.base import MARK_ENGINE, MARK_GENERATION, MARK_STATE
from supervisord.launcher.records import Record, Records
from tests.adapters.launcher_box import ENGINE, SLEEP, Box, a_box
from tests.sim.engine import alive, title_of, wait_until

WITH_WORKERS = ("/bin/sh", "-c", 'sleep 1001 & (setsid sh -c "sleep 1002 &" &); echo hello; exec sleep 1000')


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    with a_box(tmp_path / "out") as made:
        yield made


class Standin:
    """A daemon that can be killed."""

    def __init__(self, *argv: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.adapters.launcher_standin", *argv], stdout=subprocess.PIPE, text=True
        )

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it ended with {self.process.wait(10)}"
        heard: dict[str, Any] = json.loads(line)
        return heard

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


@contextlib.contextmanager
def standin(*argv: str) -> Iterator[Standin]:
    made = Standin(*argv)
    with made.process:
        try:
            yield made
        finally:
            made.process.kill()


def leave(box: Box, argv: Sequence[str], *titles: str) -> int:
    """Let a daemon launch an engine and be killed when its processes have these titles; give the engine's pid."""

    def grown() -> bool:
        return sorted(map(title_of, box.living())) == sorted(titles)

    with standin("hold", str(box.state), json.dumps({"argv": argv})) as daemon:
        pid: int = daemon.hear()["pid"]
        wait_until(grown, 10, f"processes {titles}")
        daemon.kill()
    assert grown()
    return pid


def bury(box: Box, pid: int) -> None:
    """The engine of a killed daemon became a child of this process, which is a subreaper too."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    assert box.launcher.recover() == ()


def record_of(box: Box, process: Process, **changes: Any) -> Record:
    """Put the record of a process that an earlier daemon could have written."""
    private = box.state / "tmp" / "qwen.3"
    private.mkdir(parents=True)
    record = replace(Record(ENGINE, 3, "plan-1", os.geteuid(), process, str(private), 0), **changes)
    Records(box.state / "identity").put(record)
    return record


@contextlib.contextmanager
def bystander(**env: str) -> Iterator[Process]:
    """A process of ours that no daemon started, unless its environment says so; it must outlive the block."""
    with subprocess.Popen([*SLEEP], env=env, start_new_session=True) as child:
        stat = wait_until(lambda: procfs.read_stat(child.pid), 10, "its birth")
        assert stat is not None
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        try:
            yield Process(child.pid, stat.start_ticks, boot_id)
        finally:
            assert child.poll() is None
            child.kill()


def test_an_engine_is_adopted_with_its_whole_tree(box: Box) -> None:
    pid = leave(box, WITH_WORKERS, "sleep 1000", "sleep 1001", "sleep 1002")
    with standin("take", str(box.state)) as daemon:
        found = daemon.hear()
        assert (found["engine"], found["generation"], found["pid"]) == (ENGINE, 1, pid)
        assert found["plan_id"] == "plan-1"
        assert sorted(found["members"]) == box.living()
        assert f"pid {pid} (sleep, state S)" in found["leftovers"]
        assert len(found["leftovers"]) == 3
        assert found["tail"] == ["hello"]
        os.kill(pid, signal.SIGKILL)
        assert daemon.hear() == {"exit": [ENGINE, 1, None, None]}
        assert daemon.hear() == {"remaining": []}
        assert not box.living()
        assert daemon.hear() == {"done": True}
    assert box.private() == []
    bury(box, pid)


def test_leftovers_without_their_main_process(box: Box) -> None:
    pid = leave(box, WITH_WORKERS, "sleep 1000", "sleep 1001", "sleep 1002")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: len(box.living()) == 2, 10, "its end")
    with standin("take", str(box.state)) as daemon:
        found = daemon.hear()
        assert found["pid"] == pid
        assert len(found["leftovers"]) == 3
        assert found["leftovers"][-1] == f"pid {pid}, ended meanwhile"
        assert len(found["members"]) == 2
        assert daemon.hear() == {"exit": [ENGINE, 1, None, None]}
        assert daemon.hear() == {"remaining": []}
        assert not box.living()
    assert box.private() == []
    bury(box, pid)


def test_an_engine_that_ended_meanwhile_is_told_and_loses_its_files(box: Box) -> None:
    pid = leave(box, SLEEP, "/bin/sleep 1000")
    name = Path("/dev/shm") / f"psm_svtest{os.getpid()}"
    name.touch()
    records = Records(box.state / "identity")
    records.load()
    records.add(ENGINE, 1, {"shared_memory": {name.name: name.stat().st_ino}})
    os.kill(pid, signal.SIGKILL)
    with standin("take", str(box.state)) as daemon:
        found = daemon.hear()
        assert (found["pid"], found["leftovers"]) == (pid, [f"pid {pid}, ended meanwhile"])
        assert daemon.hear() == {"exit": [ENGINE, 1, None, None]}
        assert daemon.hear() == {"remaining": []}
        assert daemon.hear() == {"done": True}
    assert not name.exists()
    assert box.private() == []
    bury(box, pid)


def test_our_own_children_are_adopted_as_such(box: Box) -> None:
    # A daemon that replaced itself (exec) is still the parent: exit codes can be read.
    env = {MARK_ENGINE: ENGINE, MARK_GENERATION: "3", MARK_STATE: str(box.state)}
    # In a session of its own, as every engine: one from outside this pid namespace would look like none.
    child = subprocess.Popen(
        ["/bin/sh", "-c", "read -r _; exit 7"], stdin=subprocess.PIPE, env=env, start_new_session=True
    )
    child.returncode = 0
    stat = procfs.read_stat(child.pid)
    assert stat is not None
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    record_of(box, Process(child.pid, stat.start_ticks, boot_id))
    (found,) = box.launcher.recover()
    assert found.process is not None
    box.launcher.adopt(ENGINE, 8)
    assert child.stdin is not None
    child.stdin.close()
    assert box.exit() == (ENGINE, 8, 7, None)
    assert box.launcher.sweep(ENGINE, 8) == ()


def test_the_end_between_recovery_and_adoption_is_told(box: Box) -> None:
    pid = leave(box, SLEEP, "/bin/sleep 1000")
    (found,) = box.launcher.recover()
    assert found.process is not None
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    wait_until(lambda: not alive(pid), 10, "its end")
    box.launcher.adopt(ENGINE, 1)
    assert box.exit() == (ENGINE, 1, None, None)
    assert box.launcher.sweep(ENGINE, 1) == ()


@pytest.mark.parametrize("change", ["start_ticks", "boot_id", "pid"])
def test_a_reused_pid_is_nobody(box: Box, change: str) -> None:
    """What it named has ended; that is news if it was in this boot."""
    with bystander() as process:
        wrong: dict[str, Any] = {"start_ticks": process.start_ticks - 1, "boot_id": "another boot", "pid": 2**22 + 1}
        recorded = replace(process, **{change: wrong[change]})
        record_of(box, recorded)
        found = box.launcher.recover()
        box.launcher.adopt(ENGINE, 3)
        if change == "boot_id":
            assert found == ()
        else:
            assert found == (Found(ENGINE, 3, recorded, (f"pid {recorded.pid}, ended meanwhile",), "plan-1"),)
            assert box.exit() == (ENGINE, 3, None, None)
        box.launcher.terminate(ENGINE, 3)
        assert box.launcher.sweep(ENGINE, 3) == ()
        assert box.private() == []
    assert box.exits.empty()


def test_a_session_of_a_reused_pid_is_nobodys(box: Box) -> None:
    # The number of the dead main process leads another session now.
    with bystander() as leader:
        record_of(box, replace(leader, start_ticks=leader.start_ticks - 1))
        (found,) = box.launcher.recover()
        assert found.leftovers == (f"pid {leader.pid}, ended meanwhile",)
        assert box.launcher.members(ENGINE) == ()


def test_processes_without_a_record(box: Box) -> None:
    pid = leave(box, SLEEP, "/bin/sleep 1000")
    (box.state / "identity" / "qwen.jsonl").unlink()
    (found,) = box.launcher.recover()
    assert (found.engine, found.generation, found.process, found.plan_id) == (ENGINE, 1, None, None)
    assert found.leftovers == (f"pid {pid} (sleep, state S)",)
    box.launcher.adopt(ENGINE, 1)
    assert box.launcher.sweep(ENGINE, 1) == ()
    assert box.private() == []


@pytest.mark.parametrize(
    "data", [b"", b'{"version": 1, "engine": "qwen", "gene', b'{"version": 99}\n', bytes(range(256))]
)
def test_a_broken_record_is_told_and_its_processes_are_found(box: Box, data: bytes) -> None:
    leave(box, SLEEP, "/bin/sleep 1000")
    (box.state / "identity" / "qwen.jsonl").write_bytes(data)
    (found,) = box.launcher.recover()
    assert found.generation == 1
    (trouble,) = box.troubles
    assert trouble.startswith(f"cannot use the identity record {box.state}/identity/qwen.jsonl: ")
    box.launcher.adopt(ENGINE, 4)
    assert box.launcher.sweep(ENGINE, 4) == ()
    box.launch(*SLEEP, generation=5)


@pytest.mark.parametrize("generation", ["9" * 5000, "-1", "x", "\u0663"])
def test_a_mark_that_is_no_generation_is_as_good_as_none(box: Box, generation: str) -> None:
    """Every process of the machine can claim one; thousands of digits are more than Python converts."""
    with bystander(**{MARK_ENGINE: ENGINE, MARK_GENERATION: generation, MARK_STATE: str(box.state)}):
        (found,) = wait_until(box.launcher.recover, 10, "the process to be found")
        assert (found.engine, found.generation) == (ENGINE, 0)


@pytest.mark.parametrize("engine", ["../../etc", "a/b", "", "UPPER", "x" * 40, "qwen\n"])
def test_marks_that_name_no_engine(box: Box, engine: str) -> None:
    with bystander(**{MARK_ENGINE: engine, MARK_GENERATION: "x", MARK_STATE: str(box.state)}) as process:
        assert box.launcher.recover() == ()
        os.kill(process.pid, 0)


def test_directories_of_no_generation_are_removed(box: Box) -> None:
    with bystander() as process:
        record_of(box, replace(process, boot_id="another boot"))
        for name in ("qwen.1", "gone.7", "stray"):
            (box.state / "tmp" / name).mkdir()
        box.launcher.recover()
        assert box.private() == []
        assert box.troubles == []


def test_an_ended_engine_is_not_found_again(box: Box) -> None:
    box.launch(*SLEEP)
    box.launcher.sweep(ENGINE, 1)
    with standin("take", str(box.state)) as daemon:
        assert daemon.hear() == {"done": True}


def test_a_daemon_that_dies_at_any_step_of_a_launch_leaves_all_or_nothing(box: Box) -> None:
    with standin("cut", str(box.state), json.dumps({"argv": SLEEP})) as daemon:
        found: list[bool] = daemon.hear()["found"]
    print(f"{len(found)} steps, the first {found.index(True)} leave nothing")
    assert len(found) > 20
    assert found == sorted(found)
    assert (found[0], found[-1]) == (False, True)
