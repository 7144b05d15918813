"""The plain launcher: how an engine is started, and what is refused."""

from __future__ import annotations

import errno
import os
import pwd
import signal
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisord.core.model import ExitClass, Process, Progress
from supervisord.launcher import preparing, procfs, spawn
from supervisord.launcher.base import GateError, Launcher, LaunchError, Ownership, StateDirError
from supervisord.launcher.plain import PlainLauncher
from supervisord.launcher.records import Record, Records
from tests.adapters.launcher_box import ENGINE, SLEEP, Box, a_box
from tests.sim.engine import Mood, http, sim_command, title_of, wait_until

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can switch users")


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    with a_box(tmp_path / "out") as made:
        yield made


def test_it_is_a_launcher(box: Box) -> None:
    launcher: Launcher = box.launcher
    assert launcher.log_path(ENGINE) == box.state / "logs" / "qwen.log"


def test_a_launch_says_who_it_is(box: Box) -> None:
    process = box.launch(*SLEEP)
    stat = procfs.read_stat(process.pid)
    assert stat is not None
    assert stat.session == process.pid
    assert process.start_ticks == stat.start_ticks
    assert process.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    assert box.launcher.members(ENGINE) == (process.pid,)
    wait_until(lambda: title_of(process.pid) == "/bin/sleep 1000", 10, "exec")
    assert box.living() == [process.pid]


@pytest.mark.parametrize("code", [0, 1, 2, 125])
def test_exit_codes(box: Box, code: int) -> None:
    box.shell(f"exit {code}")
    assert box.exit() == (ENGINE, 1, code, None)


def test_signals(box: Box) -> None:
    process = box.launch(*SLEEP, generation=4)
    os.kill(process.pid, signal.SIGSEGV)
    assert box.exit() == (ENGINE, 4, None, signal.SIGSEGV)


def test_output_goes_to_the_log(box: Box) -> None:
    box.shell("echo out; echo err >&2; printf '\\033[31mred'")
    box.exit()
    assert box.launcher.tail(ENGINE, 10) == ("out", "err", "red")
    box.launcher.sweep(ENGINE, 1)
    assert box.launcher.tail(ENGINE, 10) == ("out", "err", "red")
    box.shell("echo second", generation=2)
    box.exit()
    assert box.launcher.tail(ENGINE, 10) == ("second",)
    assert box.launcher.tail("other", 10) == ()
    text = box.launcher.log_path(ENGINE).read_text(encoding="utf-8")
    assert text.count("--- vllm-supervisor: generation ") == 2


def test_what_an_engine_starts_with(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_THE_DAEMON", "1")
    script = (
        'env >"$OUT"; for a in "$(ulimit -c)" "$(ulimit -Sn)" "$(umask)" "$(pwd)" "$(readlink /proc/self/fd/0)" '
        '"$(cat /proc/self/oom_score_adj)" "$(grep SigBlk /proc/self/status)" "$(ls /proc/$$/fd | tr "\\n" " ")"; '
        'do echo "$a" >>"$OUT"; done; echo end >>"$OUT"'
    )
    box.shell(
        script, generation=7, env={"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "1", "LISTEN_FDS": "1", "A": "b c"}
    )
    box.exit()
    private = str(box.state / "tmp" / "qwen.7")
    lines = box.written()
    cut = lines.index("0")
    env = dict(line.split("=", 1) for line in lines[:cut])
    assert env == {
        "A": "b c",
        "OUT": str(box.out),
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "PWD": private,
        "SPT_NOENV": "1",
        "TMPDIR": private,
        "VLLM_RPC_BASE_PATH": private,
        "SUPERVISED_ENGINE": ENGINE,
        "SUPERVISED_GENERATION": "7",
        "SUPERVISED_STATE": str(box.state),
    }
    core, files, umask, cwd, stdin, oom, blocked, descriptors, _ = lines[cut:]
    assert (core, umask, cwd, stdin) == ("0", "0027", private, "/dev/null")
    soft, hard = os.sysconf("SC_OPEN_MAX"), subprocess.check_output(["sh", "-c", "ulimit -Hn"], text=True).strip()
    assert files == "unlimited" or int(files) == max(soft, 65536 if hard == "unlimited" else min(int(hard), 65536))
    assert int(oom) >= spawn.OOM_SCORE_ADJ
    assert int(blocked.split()[1], 16) == 0
    assert set(descriptors.split()) <= {"0", "1", "2", "3"}


def test_an_operators_own_temporary_directory_is_kept(box: Box, tmp_path: Path) -> None:
    box.shell('echo "$TMPDIR" >"$OUT"', env={"TMPDIR": str(tmp_path)})
    assert box.written() == [str(tmp_path)]


@as_root
def test_another_user(box: Box) -> None:
    nobody = pwd.getpwnam("nobody")
    script = 'id -u; id -g; id -G; touch "$TMPDIR/mine" && echo wrote; cat ../../logs/* || echo refused; ls ../../tmp'
    box.shell(script, user="nobody")
    assert box.exit()[2] != 0
    groups = " ".join(map(str, os.getgrouplist("nobody", nobody.pw_gid)))
    uid, gid, *rest = box.launcher.tail(ENGINE, 20)
    assert (int(uid), int(gid), rest[:2]) == (nobody.pw_uid, nobody.pw_gid, [groups, "wrote"])
    assert "refused" in rest
    private = (box.state / "tmp" / "qwen.1").stat()
    assert (private.st_uid, private.st_mode & 0o777) == (nobody.pw_uid, 0o700)
    assert box.launcher.log_path(ENGINE).stat().st_uid == 0


@as_root
def test_a_state_directory_that_the_user_may_not_pass(box: Box) -> None:
    box.state.chmod(0o700)
    with pytest.raises(LaunchError, match=rf"nobody may not pass {box.state} \(mode 0700\)") as caught:
        box.launch(*SLEEP, user="nobody")
    assert caught.value.kind is ExitClass.CONFIG


@pytest.mark.parametrize(
    ("argv", "fields", "kind", "message"),
    [
        (("/no/such/vllm",), {}, ExitClass.CONFIG, "cannot start /no/such/vllm: there is no such program; install it"),
        (("vllm",), {"env": {"PATH": "/nowhere"}}, ExitClass.CONFIG, r"cannot start vllm: .* in PATH \(/nowhere\)"),
        (("/etc/passwd",), {}, ExitClass.CONFIG, "cannot start /etc/passwd: there is no such program"),
        (SLEEP, {"user": "no-such-user"}, ExitClass.CONFIG, "cannot run as no-such-user: there is no such user"),
        (SLEEP, {"env": {"A": "x\0y"}}, ExitClass.CONFIG, "cannot start /bin/sleep: embedded null"),
        ((*SLEEP, "x" * 300_000), {}, ExitClass.CONFIG, "cannot start /bin/sleep: Argument list too long"),
        (SLEEP, {"host": "192.0.2.1"}, ExitClass.EXTERNAL, "cannot listen on port"),
    ],
)
def test_what_cannot_be_started(
    box: Box, argv: tuple[str, ...], fields: dict[str, Any], kind: ExitClass, message: str
) -> None:
    with pytest.raises(LaunchError, match=message) as caught:
        box.launch(*argv, **fields)
    assert caught.value.kind is kind
    assert not box.living()
    box.launch(*SLEEP)


def test_the_port_gate(box: Box) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(GateError) as caught:
        box.launch(*SLEEP, port=server.getsockname()[1])
    assert caught.value.code == "port_held"
    assert f"held by pid {os.getpid()} (" in str(caught.value)
    assert not box.living()


def test_the_disk_gate(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "FREE_BYTES_MIN", 2**80)
    with pytest.raises(
        GateError, match=rf"^cannot start qwen: \d+ MiB free on {box.state}, \d+ MiB are needed"
    ) as caught:
        box.launch(*SLEEP)
    assert caught.value.code == "disk_full"


def test_a_disk_that_is_full_after_all(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(_records: Records, _record: Record) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/state/identity/qwen.jsonl")

    with monkeypatch.context() as patch:
        patch.setattr(Records, "put", put)
        with pytest.raises(GateError) as caught:
            box.launch(*SLEEP)
    assert caught.value.code == "disk_full"
    assert str(caught.value) == (
        "cannot start qwen: /state/identity/qwen.jsonl: No space left on device; free some space"
    )
    assert not box.living()
    box.launch(*SLEEP)


def test_a_child_that_dies_while_it_is_held(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(_records: Records, record: Record) -> None:
        os.kill(record.process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, record.process.pid, os.WEXITED | os.WNOWAIT)

    with monkeypatch.context() as patch:
        patch.setattr(Records, "put", put)
        with pytest.raises(LaunchError, match="Broken pipe") as caught:
            box.launch(*SLEEP)
    assert caught.value.kind is ExitClass.RESOURCE


def test_a_disk_that_fails_later_is_told(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    def sync(_records: Records, _engine: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Records, "sync", sync)
    process = box.launch(*SLEEP)
    assert box.launcher.members(ENGINE) == (process.pid,)
    assert box.troubles == ["cannot write the identity record of qwen to the disk: Input/output error"]


def test_never_two_generations_at_once(box: Box) -> None:
    box.launch(*SLEEP)
    with pytest.raises(LaunchError, match="cannot start qwen: generation 1 of it has not been swept"):
        box.launch(*SLEEP, generation=2)
    box.launcher.sweep(ENGINE, 1)
    box.launch(*SLEEP, generation=2)


def test_a_state_directory_without_room_for_ours(tmp_path: Path) -> None:
    (tmp_path / "identity").touch()
    with pytest.raises(StateDirError, match=r"^cannot make .*/identity in supervisor.state_dir: File exists"):
        PlainLauncher(tmp_path, lambda *_: None, print)


def progress_once(box: Box, seen: Callable[[Progress], bool]) -> Progress:
    """The first progress that satisfies."""
    while not seen(now := box.launcher.progress(ENGINE)):
        time.sleep(0.02)
    return now


def test_progress_and_memory(box: Box) -> None:
    assert box.launcher.progress(ENGINE) == Progress(0, 0, 0)
    assert box.launcher.host_bytes(ENGINE) is None
    script = (
        'read=open("/dev/zero","rb").read; data=[read(8<<20)]; print("loading 1", flush=True);'
        'print("loading 2", flush=True); sys.stdin=open(os.environ["OUT"]); sys.stdin.readline(); '
        'data.append(read(8<<20)); print("loaded", flush=True); time.sleep(1000)'
    )
    os.mkfifo(box.out)
    box.launch("/usr/bin/env", "python3", "-IS", "-c", f"import os, sys, time; {script}")
    first = progress_once(box, lambda progress: progress.log_lines == 1 and progress.memory_bytes > 8 << 20)
    assert first.read_bytes > 8 << 20
    box.out.write_text("go\n", encoding="utf-8")
    second = progress_once(box, lambda progress: progress.log_lines == 2)
    assert second.read_bytes >= first.read_bytes + (8 << 20)
    assert second.memory_bytes >= first.memory_bytes + (8 << 20)
    assert box.launcher.host_bytes(ENGINE) == pytest.approx(second.memory_bytes, abs=1 << 20)


def test_bytes_read_do_not_fall_when_a_process_ends(box: Box) -> None:
    os.mkfifo(box.out)
    box.shell('head -c 9000000 /dev/zero | (cat >/dev/null; read -r _ <"$OUT"); exec sleep 1000')
    before = progress_once(box, lambda progress: progress.read_bytes > 9_000_000)
    box.out.write_text("go\n", encoding="utf-8")
    box.wait_members(1)
    time.sleep(1.1)  # older than a census that samples share
    assert box.launcher.progress(ENGINE).read_bytes >= before.read_bytes


def test_a_running_log_is_cut(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("supervisord.launcher.logs.CUT_BYTES", 5000)
    monkeypatch.setattr("supervisord.launcher.logs.ROTATE_BYTES", 1000)
    os.mkfifo(box.out)
    box.shell(
        'i=0; while [ $i -lt 999 ]; do echo "line $i"; i=$((i+1)); done; read -r _ <"$OUT"; echo after; exec sleep 9'
    )
    wait_until(lambda: box.launcher.tail(ENGINE, 1) == ("line 998",), 10, "the lines")
    assert box.launcher.rotate_if_large(ENGINE)
    assert not box.launcher.rotate_if_large(ENGINE)
    box.out.write_text("go\n", encoding="utf-8")
    wait_until(lambda: box.launcher.tail(ENGINE, 5) == ("after",), 10, "the line after the cut")
    assert box.troubles == []


def test_the_simulated_vllm(box: Box, tmp_path: Path) -> None:
    mood = Mood(tmp_path / "mood.json")
    plan = box.plan(*sim_command(), "tiny", env=mood.env | {"VLLM_SIM_MAX_LIFE_S": "60"})
    plan = box.plan(*plan.argv, "--host", plan.host, "--port", str(plan.port), env=dict(plan.env), port=plan.port)
    assert box.launcher.owns_listener(ENGINE, plan.host, plan.port) == Ownership(ours=False)
    process = box.launcher.launch(plan, 1)

    def answers() -> bool:
        try:
            return http("GET", f"http://{plan.host}:{plan.port}/health").status == 200
        except OSError:
            return False

    wait_until(answers, 20, "/health")
    assert box.launcher.owns_listener(ENGINE, plan.host, plan.port) == Ownership(ours=True)
    assert len(box.launcher.members(ENGINE)) == len(box.living()) >= 3
    shared = set(procfs.shared_memory(box.living()[-1]))
    os.kill(process.pid, signal.SIGKILL)
    assert box.exit() == (ENGINE, 1, None, signal.SIGKILL)
    assert box.living(), "orphans hold the memory"
    assert box.launcher.sweep(ENGINE, 1) == ()
    assert not box.living()
    assert box.private() == []
    assert not any((Path("/dev/shm") / name).exists() for name in shared)
    assert box.troubles == []


def test_from_crash_to_relaunch(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[float] = []
    release = spawn.Held.release

    def note(held: spawn.Held) -> None:
        release(held)
        released.append(time.perf_counter())

    monkeypatch.setattr(spawn.Held, "release", note)
    splits: list[tuple[float, ...]] = []
    process: Process = box.launch(*SLEEP)
    for generation in range(2, 32):
        wait_until(lambda: title_of(process.pid).startswith("/bin/sleep"), 10, "exec")  # noqa: B023 (called at once)
        began = time.perf_counter()
        os.kill(process.pid, signal.SIGKILL)
        told, _ = box.exits.get(timeout=10)
        assert box.launcher.sweep(ENGINE, generation - 1) == ()
        swept = time.perf_counter()
        process = box.launch(*SLEEP, generation=generation)
        done = time.perf_counter()
        splits.append((told - began, swept - told, released[-1] - swept, done - released[-1], released[-1] - began))
    names = ("callback", "sweep", "launch", "fsync", "crash to relaunch")
    for name, values in zip(names, zip(*splits, strict=True), strict=True):
        best, median = min(values) * 1000, statistics.median(values) * 1000
        print(f"{name}: best {best:.2f} ms, median {median:.2f} ms")
    assert min(values) < 0.05
    box.launcher.sweep(ENGINE, 31)
