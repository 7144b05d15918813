"""Ending an engine: everything that is its own, and nothing else, and only gone when it is gone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisord.launcher import common, orphans, procfs
from supervisord.launcher.base import MARK_ENGINE, MARK_STATE
from tests.adapters.launcher_box import ENGINE, SLEEP, Box, a_box, zombies
from tests.sim.engine import alive, wait_until

SHM = Path("/dev/shm")

TREE = "sleep 1001 & sleep 1002 & echo ok >>$OUT; wait"
ESCAPED = '(setsid sh -c "sleep 1003 & echo \\$! >>$OUT" &); exec sleep 1000'
"""A grandchild in a session of its own whose parents are gone: only its marks say whose it is."""


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    with a_box(tmp_path / "out") as made:
        yield made


@contextlib.contextmanager
def foreign(**env: str) -> Iterator[int]:
    """A process like an engine's, started by us, that is nobody's engine."""
    with subprocess.Popen([*SLEEP], env=env, start_new_session=True) as child:
        try:
            yield child.pid
        finally:
            assert child.poll() is None, "a foreign process was ended"
            child.kill()


def test_orphans_of_a_killed_main_process(box: Box) -> None:
    process = box.shell(TREE)
    box.written()
    members = box.wait_members(3)
    os.kill(process.pid, signal.SIGKILL)
    assert box.exit() == (ENGINE, 1, None, signal.SIGKILL)
    assert len(box.launcher.members(ENGINE)) == 2
    assert box.launcher.sweep(ENGINE, 1) == ()
    assert not any(alive(pid) for pid in members)
    assert box.launcher.members(ENGINE) == ()
    assert zombies() == []


def test_a_living_engine_is_ended_and_told(box: Box) -> None:
    box.shell(TREE, generation=3)
    box.wait_members(3)
    assert box.launcher.sweep(ENGINE, 3) == ()
    assert box.exit() == (ENGINE, 3, None, signal.SIGKILL)


def test_a_grandchild_that_left_session_and_parents(box: Box) -> None:
    process = box.shell(ESCAPED)
    escaped = int(box.written()[0])
    wait_until(lambda: set(box.launcher.members(ENGINE)) == {process.pid, escaped}, 10, "the end of those between")
    stat = procfs.read_stat(escaped)
    assert stat is not None
    assert stat.ppid == os.getpid()
    assert stat.session != process.pid
    assert box.launcher.sweep(ENGINE, 1) == ()
    assert not alive(escaped)
    assert zombies() == []


def test_a_grandchild_found_only_after_the_main_process(box: Box) -> None:
    process = box.shell(ESCAPED)
    escaped = int(box.written()[0])
    os.kill(process.pid, signal.SIGKILL)
    box.exit()
    assert box.launcher.sweep(ENGINE, 1) == ()
    assert not alive(escaped)


def test_a_process_without_marks_that_was_a_member_once(box: Box) -> None:
    # No marks, no session, in the end no parent: known by the count that was made while it had one.
    process = box.shell('setsid env -i sleep 1004 & echo $! >>"$OUT"; exec sleep 1000')
    escaped = int(box.written()[0])
    wait_until(lambda: b"sleep" in Path(f"/proc/{escaped}/comm").read_bytes(), 10, "exec")
    assert procfs.marks(escaped) is None
    assert escaped in box.wait_members(2)
    os.kill(process.pid, signal.SIGKILL)
    box.exit()
    assert box.launcher.sweep(ENGINE, 1) == ()
    assert not alive(escaped)


def test_session_mates_born_before_the_end_need_no_marks(box: Box) -> None:
    process = box.shell('env -i sleep 1005 & echo $! >>"$OUT"; exec sleep 1000')
    mate = int(box.written()[0])
    wait_until(lambda: b"sleep" in Path(f"/proc/{mate}/comm").read_bytes(), 10, "exec")
    os.kill(process.pid, signal.SIGKILL)
    box.exit()
    assert box.launcher.sweep(ENGINE, 1) == ()
    assert not alive(mate)


def test_look_alikes_are_left_alone(box: Box) -> None:
    state, elsewhere = str(box.state), "/var/lib/vllm-supervisor"
    with (
        foreign(),
        foreign(**{MARK_ENGINE: ENGINE, MARK_STATE: elsewhere}),
        foreign(**{MARK_ENGINE: "other", MARK_STATE: elsewhere}),
        foreign(**{MARK_ENGINE: ENGINE}),
    ):
        process = box.launch(*SLEEP)
        assert box.launcher.members(ENGINE) == (process.pid,)
        assert box.launcher.sweep(ENGINE, 1) == ()
    with subprocess.Popen([*SLEEP], env={MARK_ENGINE: "other", MARK_STATE: state}, start_new_session=True) as other:
        box.launch(*SLEEP, generation=2)
        assert box.launcher.sweep(ENGINE, 2) == ()
        assert other.poll() is None
        other.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can switch users")
def test_marks_in_another_users_process_prove_nothing(box: Box) -> None:
    nobody = pwd.getpwnam("nobody").pw_uid
    env = {MARK_ENGINE: ENGINE, MARK_STATE: str(box.state)}
    with subprocess.Popen([*SLEEP], env=env, user=nobody, start_new_session=True) as other:
        box.launch(*SLEEP)
        assert box.launcher.sweep(ENGINE, 1) == ()
        assert other.poll() is None
        other.kill()


def test_sigterm_goes_to_the_main_process_alone(box: Box) -> None:
    box.shell('trap "echo term >>$OUT; exit 5" TERM; sleep 1001 & echo ok >>$OUT; while :; do wait; done')
    box.written()
    box.launcher.terminate(ENGINE, 2)
    box.launcher.terminate("other", 1)
    assert box.exits.empty()
    box.launcher.terminate(ENGINE, 1)
    assert box.exit() == (ENGINE, 1, 5, None)
    assert box.written(2) == ["ok", "term"]
    assert len(box.launcher.members(ENGINE)) == 1
    box.launcher.terminate(ENGINE, 1)
    assert box.troubles == []


def test_processes_that_ignore_sigterm(box: Box) -> None:
    process = box.shell('trap "" TERM; sh -c "sleep 1001" & echo ok >>$OUT; wait')
    box.written()
    box.launcher.terminate(ENGINE, 1)
    assert alive(process.pid)
    assert box.launcher.sweep(ENGINE, 1) == ()


def test_a_fork_storm(box: Box) -> None:
    box.shell("echo ok >>$OUT; while :; do (sleep 0.01 &) ; (setsid sleep 0.05 &); done")
    box.written()
    time.sleep(0.1)
    assert box.launcher.sweep(ENGINE, 1) == ()
    assert not box.living()


def test_what_belongs_to_another_generation_is_not_touched(box: Box) -> None:
    process = box.launch(*SLEEP, generation=5)
    assert box.launcher.sweep(ENGINE, 4) == ()
    assert box.launcher.sweep(ENGINE, 6) == ()
    assert box.launcher.sweep("other", 5) == ()
    assert alive(process.pid)


def test_what_does_not_die_is_reported_and_keeps_its_files(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    process = box.launch(*SLEEP)
    wait_until(lambda: b"sleep" in Path(f"/proc/{process.pid}/comm").read_bytes(), 10, "exec")
    with monkeypatch.context() as patch:
        patch.setattr(signal, "pidfd_send_signal", lambda *_: None)
        patch.setattr(common, "SWEEP_S", 0.3)
        began = time.monotonic()
        assert box.launcher.sweep(ENGINE, 1) == (f"pid {process.pid} (sleep, state S)",)
        assert 0.3 <= time.monotonic() - began < 20
    assert box.private() == ["qwen.1"]
    assert box.launcher.members(ENGINE) == (process.pid,)
    assert box.launcher.sweep(ENGINE, 1) == ()
    assert box.private() == []
    assert box.launcher.sweep(ENGINE, 1) == ()


def test_the_private_directory_goes_and_what_it_points_to_stays(box: Box, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    mode = "0" if os.geteuid() == 0 else "0700"
    box.shell(
        f"mkdir -p $TMPDIR/a/b; ln -s {precious} $TMPDIR/a/link; ln -s {precious}/file $TMPDIR/file; "
        f"mkfifo $TMPDIR/pipe; chmod {mode} $TMPDIR/a/b; echo ok >>$OUT"
    )
    box.written()
    box.exit()
    assert box.launcher.sweep(ENGINE, 1) == ()
    assert box.private() == []
    assert (precious / "file").exists()
    assert box.troubles == []


def test_a_directory_that_cannot_be_removed_is_told(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    def rmtree(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    box.launch(*SLEEP)
    with monkeypatch.context() as patch:
        patch.setattr("supervisord.launcher.statedir.shutil.rmtree", rmtree)
        assert box.launcher.sweep(ENGINE, 1) == ()
    where = box.state / "tmp" / "qwen.1"
    assert box.troubles == [f"cannot remove the temporary directory of qwen: {where}: Permission denied"]


# --- /dev/shm -------------------------------------------------------------------------------------------------------


@pytest.fixture
def names() -> Iterator[list[str]]:
    made = [f"psm_svtest{os.getpid()}{letter}" for letter in "abcd"]
    yield made
    for name in made:
        (SHM / name).unlink(missing_ok=True)


def holding(*names: str) -> str:
    """Script that makes files in /dev/shm and keeps them open in a child."""
    opened = "; ".join(f"exec {number}<>/dev/shm/{name}" for number, name in enumerate(names, start=5))
    return f"({opened}; echo ok >>$OUT; exec sleep 1001) & wait"


def test_shared_memory_of_orphans(box: Box, names: list[str]) -> None:
    (SHM / names[2]).touch()
    process = box.shell(holding(*names[:2]))
    box.written()
    os.kill(process.pid, signal.SIGKILL)
    box.exit()
    assert box.launcher.sweep(ENGINE, 1) == ()
    assert [(SHM / name).exists() for name in names] == [False, False, True, False]
    assert box.troubles == []


def test_shared_memory_seen_before_all_died_at_once(box: Box, names: list[str]) -> None:
    box.shell(holding(*names[:2]))
    box.written()
    assert box.launcher.host_bytes(ENGINE)
    for pid in box.living():
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not box.living(), 10, "their end")
    assert box.launcher.sweep(ENGINE, 1) == ()
    assert not any((SHM / name).exists() for name in names)


def test_shared_memory_that_somebody_else_uses_stays(box: Box, names: list[str]) -> None:
    box.shell(holding(*names[:2]))
    box.written()
    with (SHM / names[0]).open("rb"):
        assert box.launcher.sweep(ENGINE, 1) == ()
    assert [(SHM / name).exists() for name in names] == [True, False, False, False]


def test_where_no_lease_is_given_all_processes_are_looked_at(
    box: Box, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in a container without CAP_LEASE, with an engine of another user.
    monkeypatch.setattr(fcntl, "F_SETLEASE", -1)
    box.shell(holding(*names[:3]))
    box.written()
    with (SHM / names[0]).open("rb"):
        assert box.launcher.sweep(ENGINE, 1) == ()
    assert [(SHM / name).exists() for name in names] == [True, False, False, False]


def test_a_name_that_means_another_file_now_stays(box: Box, names: list[str]) -> None:
    box.shell(holding(*names[:3]))
    box.written()
    box.launcher.host_bytes(ENGINE)
    for pid in box.living():
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not box.living(), 10, "their end")
    (SHM / names[0]).rename(SHM / names[3])
    (SHM / names[0]).touch()
    (SHM / names[1]).unlink()
    (SHM / names[1]).symlink_to(SHM / names[3])
    assert box.launcher.sweep(ENGINE, 1) == ()
    assert [(SHM / name).exists() for name in names] == [True, True, False, True]


# --- the dead -------------------------------------------------------------------------------------------------------


def test_dead_orphans_are_buried_by_the_way(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "UNCLAIMED_S", 0.2)
    box.shell("(sleep 0.01 &); (setsid sh -c 'sleep 0.01 &' &); echo ok >>$OUT; exec sleep 1000")
    box.written()

    def buried() -> bool:
        box.launcher.members(ENGINE)
        return not any(s.ppid == os.getpid() and not s.alive for s in procfs.census().processes.values())

    time.sleep(0.05)
    began = time.monotonic()
    wait_until(buried, 10, "the burial")
    assert time.monotonic() - began > 0.1, "a leader of a session may be somebody's"
    assert box.exits.empty()


def test_children_of_other_parts_of_the_daemon_keep_their_status(box: Box) -> None:
    box.launch(*SLEEP)
    others = [subprocess.Popen(["/bin/sh", "-c", "exit 9"], start_new_session=new) for new in (False, True)]
    for other in others:
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    box.launcher.members(ENGINE)
    assert box.launcher.sweep(ENGINE, 1) == ()
    assert [other.wait() for other in others] == [9, 9]
