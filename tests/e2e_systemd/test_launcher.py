"""Engines as transient services under a real systemd: started, adopted, stopped, swept, classified."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from tests.e2e_systemd.machine import Machine
from tests.e2e_systemd.node import CONFIG, STATE_DIR, UNIT, SupervisedNode
from tests.sim.engine import wait_until

ENGINE_UNIT = "vllm-engine-a.service"


def test_an_engine_is_a_service_of_its_own(node: SupervisedNode) -> None:
    node.configure("a", "b")
    node.start()
    engine = node.wait_state("a", "ready")
    node.wait_state("b", "ready")
    assert node.status()["supervisor"]["launcher"] == "systemd"
    shown = node.machine.show(
        ENGINE_UNIT, "MainPID", "Slice", "User", "Before", "After", "RemainAfterExit", "ActiveState", "PrivateTmp",
        "LimitCORE", "OOMScoreAdjust", "OOMPolicy", "SyslogIdentifier", "KillMode", "Environment",
    )  # fmt: skip
    assert int(shown["MainPID"]) == engine["pid"]
    assert shown["Slice"] == "vllm.slice"
    assert shown["User"] == "nobody"
    assert UNIT in shown["Before"]
    assert UNIT not in shown["After"]
    assert shown["RemainAfterExit"] == shown["PrivateTmp"] == "yes"
    assert shown["LimitCORE"] == "0"
    assert shown["OOMScoreAdjust"] == "100"
    assert shown["OOMPolicy"] == "kill"
    assert shown["SyslogIdentifier"] == "vllm-a"
    environ = node.machine.run("cat", f"/proc/{engine['pid']}/environ").stdout
    assert "hf_quite-secret" in environ
    assert "NOTIFY_SOCKET" not in environ
    assert "WATCHDOG" not in environ
    everything = node.machine.run("systemctl", "show", ENGINE_UNIT).stdout
    assert "hf_quite-secret" not in everything, "anybody can read the properties of a unit"
    mode = node.machine.run("stat", "-c", "%a %U", f"{STATE_DIR}/environment/a").stdout.strip()
    assert mode == "600 root"
    assert "Application startup complete" in node.cli("logs", "a").stdout


def test_text_that_systemd_would_expand_reaches_the_engine_as_it_is(node: SupervisedNode) -> None:
    value = "a $HOME \"b\" \\c `d` %n 'e' ${F} \\"
    node.configure("a", env={"ODD": value, "LINES_OF": "one\ntwo\t#x"}, args={"served-model-name": "$HOME-%n-$$"})
    node.start()
    pid = node.wait_state("a", "ready")["pid"]
    variables = node.machine.run("cat", f"/proc/{pid}/environ").stdout.split("\0")
    assert f"ODD={value}" in variables
    assert "LINES_OF=one\ntwo\t#x" in variables
    command = node.machine.run(
        "/usr/bin/python3",
        "-c",
        "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8101/v1/models').read())",
    )
    assert "$HOME-%n-$$" in command.stdout


def test_a_daemon_reload_leaves_the_unit_as_it_was(node: SupervisedNode) -> None:
    node.configure("a", args={"served-model-name": "$HOME-%n-$$"})
    node.start()
    node.wait_state("a", "ready")
    told = ("LoadState", "MainPID", "KillMode", "OOMPolicy", "RemainAfterExit", "MemoryAccounting", "TasksMax")
    before = node.machine.show(ENGINE_UNIT, *told)
    node.machine.run("systemctl", "daemon-reload")
    assert node.machine.show(ENGINE_UNIT, *told) == before
    assert before["LoadState"] == "loaded"


def test_a_killed_daemon_leaves_engines_to_the_next(node: SupervisedNode) -> None:
    node.configure("a", "b")
    node.start()
    before = node.wait_state("a", "ready")
    node.wait_state("b", "ready")
    asking = node.asking(8101)
    old = node.pid
    node.kill(old)
    node.wait_new_daemon(old)
    after = node.wait_state("a", "ready")
    answers, failures = asking.end()
    assert failures == "[]"
    assert answers > 10
    assert after["pid"] == before["pid"]
    assert after["generation"] == before["generation"] == 1
    assert after["restarts"] == 0
    assert len(node.events("adopted")) == 2


@pytest.mark.parametrize("how", [("restart", UNIT), ("kill", UNIT), ("try-restart", UNIT)])
def test_a_restart_keeps_engines(node: SupervisedNode, how: tuple[str, ...]) -> None:
    node.configure("a")
    if how[0] == "kill":
        # It ends in good order then, which is no failure.
        node.machine.write(f"/etc/systemd/system/{UNIT}.d/always.conf", "[Service]\nRestart=always\n")
        node.machine.run("systemctl", "daemon-reload")
    node.start()
    before = node.wait_state("a", "ready")
    asking = node.asking(8101)
    old = node.pid
    node.machine.run("systemctl", *how)
    node.wait_new_daemon(old)
    after = node.wait_state("a", "ready")
    answers, failures = asking.end()
    assert failures == "[]"
    assert answers > 10
    assert (after["pid"], after["generation"]) == (before["pid"], 1)


def test_a_stop_ends_engines(node: SupervisedNode) -> None:
    node.configure("a", "b")
    node.start()
    node.wait_state("a", "ready")
    node.wait_state("b", "ready")
    node.machine.run("systemctl", "stop", UNIT)
    assert node.processes("a") == node.processes("b") == []
    assert node.machine.run("systemctl", "list-units", "--all", "--no-legend", "vllm-engine-*").stdout == ""
    assert node.machine.run("ls", f"{STATE_DIR}/environment", f"{STATE_DIR}/tmp").stdout.split() == [
        f"{STATE_DIR}/environment:",
        f"{STATE_DIR}/tmp:",
    ]
    node.start()
    assert node.wait_state("a", "ready")["generation"] == 2


def test_no_orphan_outlives_a_killed_server(node: SupervisedNode) -> None:
    node.configure("a")
    node.start()
    old = node.wait_state("a", "ready")
    processes = node.processes("a")
    assert len(processes) > 1
    node.kill(old["pid"])
    new = node.wait_state("a", "ready", 2)
    assert not set(processes) & set(node.processes("a"))
    assert new["last_exit"]["signal"] == 9
    assert new["last_exit"]["class"] == "crash"
    left = [pid for pid in processes if node.machine.run("test", "-e", f"/proc/{pid}", check=False).returncode == 0]
    assert left == []


@pytest.mark.parametrize(("code", "kind"), [(0, "crash"), (3, "crash")])
def test_exit_codes_are_read_from_the_unit(node: SupervisedNode, code: int, kind: str) -> None:
    node.configure("a")
    node.start()
    node.wait_state("a", "ready")
    node.mood(exit={"after_s": 0, "code": code})
    last = node.wait_engine("a", lambda e: e["last_exit"] is not None, "an exit")["last_exit"]
    node.mood()
    assert (last["code"], last["signal"], last["class"]) == (code, None, kind)
    node.wait_state("a", "ready")


def test_a_wrong_flag_is_a_configuration_error(node: SupervisedNode) -> None:
    node.mood(start_error={"capture": "maxlen_gt_kv"})
    node.configure("a")
    node.start()
    failed = node.wait_state("a", "failed")
    assert failed["last_exit"]["class"] == "config"
    assert node.machine.run("systemctl", "list-units", "--all", "--no-legend", "vllm-engine-*").stdout == ""


def test_a_program_that_cannot_be_executed_is_said_as_such(node: SupervisedNode) -> None:
    node.machine.write("/opt/broken/vllm", "\x7fELF and nothing more", 0o755)
    node.configure("a", command=["/opt/broken/vllm", "serve"])
    node.start()
    failed = node.wait_state("a", "failed")
    assert "systemd could not execute it" in failed["reasons"][0]["message"]
    assert node.machine.run("systemctl", "list-units", "--all", "--no-legend", "vllm-engine-*").stdout == ""


def test_an_engine_that_died_while_no_daemon_ran_is_classified(node: SupervisedNode) -> None:
    node.configure("a")
    node.start()
    old = node.wait_state("a", "ready")
    node.machine.write(f"/etc/systemd/system/{UNIT}.d/never.conf", "[Service]\nRestart=no\n")
    node.machine.run("systemctl", "daemon-reload")
    node.kill(node.pid)
    wait_until(lambda: node.machine.show(UNIT, "ActiveState")["ActiveState"] == "failed", 30, "the daemon to be gone")
    node.kill(old["pid"], "SEGV")
    wait_until(lambda: node.machine.show(ENGINE_UNIT, "MainPID")["MainPID"] == "0", 30, "the engine to be gone")
    node.start()
    new = node.wait_state("a", "ready", 2)
    assert new["last_exit"]["signal"] == 11
    assert new["last_exit"]["generation"] == 1


def test_without_any_state_units_alone_suffice(node: SupervisedNode) -> None:
    node.configure("a")
    node.start()
    before = node.wait_state("a", "ready")
    node.machine.write(f"/etc/systemd/system/{UNIT}.d/never.conf", "[Service]\nRestart=no\n")
    node.machine.run("systemctl", "daemon-reload")
    node.kill(node.pid)
    wait_until(lambda: node.machine.show(UNIT, "ActiveState")["ActiveState"] == "failed", 30, "the daemon to be gone")
    node.machine.run("sh", "-c", f"rm -rf {STATE_DIR}/*.json {STATE_DIR}/state* {STATE_DIR}/*.db*")
    node.start()
    after = node.wait_state("a", "ready")
    assert (after["pid"], after["generation"]) == (before["pid"], 1)


def test_an_engine_whose_configuration_changed_meanwhile_is_restarted(node: SupervisedNode) -> None:
    node.configure("a")
    node.start()
    before = node.wait_state("a", "ready")
    node.configure("a", args={"max-model-len": 1024})
    node.machine.run("systemctl", "restart", UNIT)
    after = node.wait_state("a", "ready", 2)
    assert after["pid"] != before["pid"]
    assert len(node.events("leftover")) == 1


def test_somebody_else_who_stops_the_unit_is_an_operator(node: SupervisedNode) -> None:
    node.configure("a")
    node.start()
    node.wait_state("a", "ready")
    node.machine.run("systemctl", "stop", ENGINE_UNIT)
    stopped = node.wait_state("a", "stopped")
    assert stopped["wanted"] == "stopped"
    assert stopped["last_exit"]["class"] == "stopped"
    node.cli("start", "a", "--wait")
    assert node.engine("a")["generation"] == 2
    node.machine.run("systemctl", "stop", "vllm.slice")
    node.wait_state("a", "stopped")
    node.cli("start", "a", "--wait")


def test_a_reboot_brings_engines_back(node: SupervisedNode) -> None:
    node.configure("a")
    node.machine.run("systemctl", "enable", "--now", UNIT)
    node.wait_state("a", "ready")
    node.machine.reboot()
    assert node.wait_state("a", "ready")["generation"] == 2
    ended = [event["event"] for event in node.events("stopped")]
    assert len(ended) == 1, f"the daemon ended its engine before the machine went down: {ended}"


def test_a_bad_configuration_does_not_leave_engines_alone(node: SupervisedNode) -> None:
    node.configure("a")
    node.start()
    before = node.wait_state("a", "ready")
    node.machine.write(CONFIG, "[supervisor\n", 0o600)
    old = node.pid
    node.machine.run("systemctl", "restart", UNIT)
    node.wait_new_daemon(old)
    after = node.wait_state("a", "ready")
    assert (after["pid"], after["generation"]) == (before["pid"], 1)
    assert "the last one that was applied is used" in node.status()["supervisor"]["config_error"]
    node.kill(after["pid"])
    node.wait_state("a", "ready", 2)
    node.configure("a")
    node.cli("reload", "--wait")
    assert node.status()["supervisor"]["config_error"] is None
    assert node.engine("a")["generation"] == 2
    node.machine.run("systemctl", "stop", UNIT)
    node.machine.write(CONFIG, "[supervisor\n", 0o600)
    node.machine.write(f"/etc/systemd/system/{UNIT}.d/never.conf", "[Service]\nRestart=no\n")
    node.machine.run("systemctl", "daemon-reload")
    node.machine.run("systemctl", "start", UNIT, check=False)
    assert node.machine.show(UNIT, "ExecMainStatus")["ExecMainStatus"] == "2", "nothing lives: said, and no daemon"


def test_a_daemon_killed_again_and_again_converges(node: SupervisedNode) -> None:
    """SIGKILL in the middle of whatever a start, a stop or a restart does (test_crashes.py: between its steps)."""
    node.configure("a", "b", warmup={"enabled": False})
    node.start()
    for delay_s in (0.0, 0.02, 0.08):
        for op in ("restart", "stop", "start"):
            node.cli(op, "a", check=False)
            time.sleep(delay_s)
            old = node.pid
            node.kill(old)
            node.wait_new_daemon(old)
            units = node.machine.run("systemctl", "list-units", "--all", "--no-legend", "vllm-engine-a*").stdout
            assert len(units.splitlines()) <= 1
    node.cli("start", "a", check=False)
    node.wait_state("a", "ready")
    assert node.wait_state("b", "ready")["generation"] == 1
    assert not node.machine.run("sh", "-c", f"ls {STATE_DIR}/bug-* 2>/dev/null", check=False).stdout


def test_a_restart_while_an_engine_loads_does_not_begin_anew(node: SupervisedNode) -> None:
    node.mood(ready_delay_s=5)
    node.configure("a")
    node.start()
    before = node.wait_state("a", "starting", 1)
    old = node.pid
    node.machine.run("systemctl", "restart", UNIT)
    node.wait_new_daemon(old)
    after = node.wait_state("a", "ready")
    assert (after["pid"], after["generation"]) == (before["pid"], 1)


_LAUNCH = """
import sys
from pathlib import Path
from supervisord.core.model import LaunchPlan
from supervisord.launcher import units
from supervisord.launcher.base import LaunchError
from supervisord.launcher.systemd import SystemdLauncher
units.Units.__init__.__defaults__ = (0.5,)
order, at = units.Units.start, sys.argv[1]
def start(self, *what):
    def hang():
        print("hang", flush=True)
        sys.stdin.readline()
    if at == "before":
        hang()
    order(self, *what)
    if at == "after":
        hang()
units.Units.start = start
launcher = SystemdLauncher(Path("/var/lib/vllm-supervisor"), lambda *_: None, lambda text: print(text, flush=True))
try:
    launcher.launch(LaunchPlan("a", ("/bin/sleep", "1000"), {"PATH": "/bin"}, None, "127.0.0.1", 8101, "p"), 1)
    print("started", flush=True)
except LaunchError as error:
    print("refused", error, flush=True)
"""


@pytest.mark.parametrize("at", ["before", "after"])
def test_a_start_that_systemd_did_not_answer_leaves_no_engine(machine: Machine, at: str) -> None:
    python, env = machine.python()
    machine.write("/opt/launch.py", _LAUNCH)
    machine.run("mkdir", "-p", "/var/lib/vllm-supervisor")
    variables = (f"{name}={value}" for name, value in env.items())
    launch = machine.popen(
        "env", *variables, *python, "/opt/launch.py", at, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert launch.stdin is not None
    assert launch.stdout is not None
    assert launch.stdout.readline() == b"hang\n"
    os.kill(machine.pid1, signal.SIGSTOP)
    try:
        launch.stdin.write(b"go on\n")
        launch.stdin.flush()
        with pytest.raises(subprocess.TimeoutExpired):
            launch.wait(3)  # it makes sure first
    finally:
        os.kill(machine.pid1, signal.SIGCONT)
    told = launch.communicate(timeout=30)[0].decode()
    assert told.startswith("refused cannot start a as vllm-engine-a.service: ")
    assert machine.run("systemctl", "list-units", "--all", "--no-legend", "vllm-engine-*").stdout == ""
    assert machine.members("/vllm.slice/vllm-engine-a.service") == []


@pytest.mark.parametrize(("owner", "answer"), [("/var/lib/vllm-supervisor", "started"), ("/elsewhere", "refused")])
def test_what_lives_under_the_name_of_an_engine_is_ended_only_if_it_is_ours(
    machine: Machine, owner: str, answer: str
) -> None:
    python, env = machine.python()
    machine.write("/opt/launch.py", _LAUNCH)
    machine.run("mkdir", "-p", "/var/lib/vllm-supervisor")
    marks = (
        f"--setenv={name}" for name in ("SUPERVISED_ENGINE=a", "SUPERVISED_GENERATION=1", f"SUPERVISED_STATE={owner}")
    )
    machine.run("systemd-run", f"--unit={ENGINE_UNIT}", "--slice=vllm.slice", *marks, "sleep", "1000")
    before = machine.members(f"/vllm.slice/{ENGINE_UNIT}")
    assert machine.run(*python, "/opt/launch.py", "never", env=env).stdout.split()[0] == answer
    after = machine.members(f"/vllm.slice/{ENGINE_UNIT}")
    assert len(after) == 1
    assert (before == after) is (answer == "refused")


def test_leftovers_that_ignore_every_signal_but_one_are_gone(node: SupervisedNode) -> None:
    node.mood(escape=True, ignore_sigterm=True)
    node.configure("a", stop_timeout_s=1, drain_timeout_s=0)
    node.start()
    node.wait_state("a", "ready")
    node.cli("stop", "a", "--wait")
    assert node.processes("a") == []
    assert node.machine.run("systemctl", "list-units", "--all", "--no-legend", "vllm-engine-*").stdout == ""


def test_what_an_engine_leaves_in_tmp_and_shared_memory_is_its_own(node: SupervisedNode) -> None:
    node.configure("a")
    node.start()
    pid = node.wait_state("a", "ready")["pid"]
    inside = node.machine.run("ls", f"/proc/{pid}/root/dev/shm", f"/proc/{pid}/root/tmp").stdout
    assert "psm_" in inside
    node.kill(pid)
    node.wait_state("a", "ready", 2)
    assert node.machine.run("ls", "/dev/shm").stdout == ""


def test_plain_is_still_there_when_it_is_asked_for(node: SupervisedNode) -> None:
    node.configure("a", launcher="plain")
    node.start()
    node.wait_state("a", "ready")
    assert node.status()["supervisor"]["launcher"] == "plain"
    assert node.machine.run("systemctl", "list-units", "--all", "--no-legend", "vllm-engine-*").stdout == ""
