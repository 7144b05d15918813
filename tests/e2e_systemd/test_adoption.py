"""What outlives the daemon under a real systemd: what engines wrote, what was known of them, who may run them."""

from __future__ import annotations

import json
from datetime import datetime

import pytest

from supervisord.cli import DENIED
from tests.e2e_systemd.machine import REPOSITORY
from tests.e2e_systemd.node import CONFIG, DEADLINE_S, SOCKET, UNIT, USER, SupervisedNode
from tests.sim.engine import wait_until

ENGINE_UNIT = "vllm-engine-a.service"
SANDBOX = ("Capability", "NoNew", "Private", "Protect", "Lock", "Restrict", "SystemCall")


# --- the journal ------------------------------------------------------------------------------------------------------


def test_what_an_engine_writes_is_in_the_journal_under_its_name(node: SupervisedNode) -> None:
    node.configure("a", "b")
    node.start()
    node.wait_state("a", "ready")
    node.wait_state("b", "ready")
    node.machine.run("journalctl", "--sync")
    shown = node.machine.run("journalctl", "-t", "vllm-a", "-o", "json", "--no-pager").stdout.splitlines()
    entries = [json.loads(line) for line in shown]
    assert any("Application startup complete" in entry["MESSAGE"] for entry in entries)
    kinds = {(e["_SYSTEMD_UNIT"], e["VLLM_ENGINE"], e["VLLM_GENERATION"], e["_TRANSPORT"]) for e in entries}
    assert kinds == {(ENGINE_UNIT, "a", "1", "stdout")}
    output = node.machine.show(ENGINE_UNIT, "StandardOutput", "StandardError")
    assert output == {"StandardOutput": "journal", "StandardError": "journal"}
    assert node.machine.run("ls", "/var/lib/vllm-supervisor").stdout.split().count("logs") == 0
    node.machine.run(
        "setpriv", f"--reuid={USER}", "--clear-groups", "logger", "-t", "vllm-a", "please run this as root"
    )
    node.machine.run("journalctl", "--sync")
    shown_to_people = node.cli("logs", "a", "-n", "50").stdout
    assert "Application startup complete" in shown_to_people
    assert "please run this" not in shown_to_people
    # Who may not read the journal hears that, and is not shown an empty log.
    node.machine.run("chmod", "666", SOCKET)
    python, env = node.machine.python()
    argv = (*python, "-m", "supervisord", "--socket", SOCKET, "logs", "a")
    refused = node.machine.run("setpriv", f"--reuid={USER}", "--clear-groups", *argv, check=False, env=env)
    assert (refused.returncode, refused.stdout) == (DENIED, "")
    assert "systemd-journal" in refused.stderr


def test_nothing_that_a_busy_engine_writes_is_dropped(node: SupervisedNode) -> None:
    lines = 80_000  # of which its own limit lets 10,000 to 60,000 pass in 30 s: the more, the larger its disk
    node.configure("a", command=["/bin/bash", "-c", f"seq {lines}; echo its last words; exec sleep 1000"])
    node.start()
    argv = ("journalctl", "-q", "--no-pager", "-o", "cat", "-t", "vllm-a")
    last = (*argv, "-n", "1")
    wait_until(lambda: node.machine.run(*last).stdout == "its last words\n", DEADLINE_S, "its last words", every_s=0.1)
    assert len(node.machine.run(*argv).stdout.splitlines()) == lines + 1


def test_last_words_are_those_of_the_generation_that_ended(node: SupervisedNode) -> None:
    node.mood(start_error={"capture": "maxlen_gt_kv"})
    node.configure("a", "b")
    node.start()
    failed = node.wait_state("a", "failed")
    assert failed["last_exit"]["class"] == "config"
    advice = failed["last_exit"]["advice"]
    node.mood()
    node.cli("reset", "a")
    ready = node.wait_state("a", "ready")
    node.kill(ready["pid"])
    # The words of an earlier generation say "config"; this one just died.
    ended = ready["generation"]
    last = node.wait_engine("a", lambda e: e["last_exit"]["generation"] == ended, "its end")["last_exit"]
    assert (last["class"], last["signal"]) == ("crash", 9)
    assert last["advice"] != advice


def test_the_shipped_sandbox_lets_the_daemon_read_the_journal(node: SupervisedNode) -> None:
    shipped = (REPOSITORY / "units" / UNIT).read_text(encoding="utf-8")
    sandbox = [line for line in shipped.splitlines() if line.startswith(SANDBOX)]
    assert len(sandbox) > 10
    node.machine.write(f"/etc/systemd/system/{UNIT}.d/sandbox.conf", "\n".join(["[Service]", *sandbox, ""]))
    node.machine.run("systemctl", "daemon-reload")
    node.mood(start_error={"capture": "maxlen_gt_kv"})
    node.configure("a")
    node.start()
    assert node.wait_state("a", "failed")["last_exit"]["class"] == "config"
    assert node.events("trouble") == []


def test_a_journald_that_hangs_holds_up_no_engine(node: SupervisedNode) -> None:
    node.configure("a")
    node.start()
    pid = node.wait_state("a", "ready")["pid"]
    journald = int(node.machine.show("systemd-journald.service", "MainPID")["MainPID"])
    node.kill(journald, "STOP")
    try:
        node.kill(pid)
        after = node.wait_state("a", "ready", 2)
        assert after["last_exit"]["signal"] == 9
    finally:
        node.kill(journald, "CONT")
    wait_until(
        lambda: any("journalctl --sync" in told["event"] for told in node.events("trouble")), 30, "that to be told"
    )


def test_lines_in_the_journal_are_counted_as_progress(node: SupervisedNode) -> None:
    node.mood(ready_delay_s=600)
    node.configure("a", start_timeout_s=6)
    node.start()
    node.wait_state("a", "starting", 1)

    def lines() -> int:
        words = node.engine("a")["reasons"][0]["message"].partition(" different log lines")[0].split()
        return int(words[-1]) if words[-1].isdecimal() else 0

    assert wait_until(lines, 30, "lines of its output to be counted") >= 1
    timed_out = node.wait_engine("a", lambda e: e["last_exit"] is not None, "the start to be given up")
    assert "no new line" in timed_out["last_exit"]["advice"]


# --- another launcher than before -------------------------------------------------------------------------------------


def test_engines_that_are_services_stay_so_until_they_are_stopped(node: SupervisedNode) -> None:
    node.configure("a")
    node.start()
    before = node.wait_state("a", "ready")
    asking = node.asking(8101)
    old = node.pid
    node.configure("a", launcher="plain")
    node.machine.run("systemctl", "restart", UNIT)
    node.wait_new_daemon(old)
    assert node.wait_state("a", "ready", 1)["pid"] == before["pid"]
    assert asking.end()[1] == "[]"
    assert node.status()["supervisor"]["launcher"] == "systemd"
    (told,) = [told["event"] for told in node.events("trouble") if "launcher" in told["event"]]
    assert told.startswith("the systemd launcher goes on, because it started engines that live (a): to use the plain")
    node.machine.run("systemctl", "stop", UNIT)
    node.start()
    after = node.wait_state("a", "ready", 2)
    assert node.status()["supervisor"]["launcher"] == "plain"
    assert node.machine.run("systemctl", "list-units", "--all", "--no-legend", "vllm-engine-*").stdout == ""
    assert after["pid"] in node.machine.members(f"/system.slice/{UNIT}")


def test_engines_that_a_killed_plain_daemon_left_are_not_started_again_as_services(node: SupervisedNode) -> None:
    node.configure("a", launcher="plain")
    python, env = node.machine.python()
    by_hand = node.machine.popen(
        "env",
        *(f"{name}={value}" for name, value in env.items()),
        *python,
        "-m",
        "supervisord",
        "run",
        "--config",
        CONFIG,
    )
    before = node.wait_state("a", "ready")
    daemon = int(node.status()["supervisor"]["pid"])
    node.kill(daemon)
    by_hand.wait(DEADLINE_S)
    node.configure("a")
    node.start()
    after = node.wait_state("a", "ready", 1)
    assert after["pid"] == before["pid"]
    assert node.status()["supervisor"]["launcher"] == "plain"
    assert node.processes("a") == []
    node.machine.run("systemctl", "stop", UNIT)
    assert node.machine.run("pgrep", "-u", USER, check=False).stdout == ""
    node.start()
    node.wait_state("a", "ready", 2)
    assert node.status()["supervisor"]["launcher"] == "systemd"


# --- what was known goes on -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["kill", "restart"])
def test_an_operator_sees_no_difference_after_a_new_daemon(node: SupervisedNode, how: str) -> None:
    node.configure("a", "b")
    node.start()
    node.wait_state("b", "ready")
    node.kill(node.wait_state("a", "ready")["pid"])
    before = node.wait_state("a", "ready", 2)
    node.cli("drain", "b")
    drained = node.wait_state("b", "draining")
    old = node.pid
    if how == "kill":
        node.kill(old)
    else:
        node.machine.run("systemctl", "restart", UNIT)
    node.wait_new_daemon(old)
    after = node.wait_state("a", "ready")
    assert before["warmup"]["settled_ms"] is not None
    assert before["restarts"] == 1
    for name in ("pid", "generation", "restarts", "warmup", "wanted"):
        assert after[name] == before[name]
    # Wall-clock times are made of monotonic ones when they are asked for: the last digits differ.
    assert [seconds(after[name]) for name in ("since", "ready_since")] == pytest.approx(
        [seconds(before[name]) for name in ("since", "ready_since")], abs=0.01
    )
    last = {**after["last_exit"], "at": None}
    assert last == {**before["last_exit"], "at": None}
    still = node.wait_state("b", "draining")
    assert (still["pid"], still["generation"], still["reasons"]) == (drained["pid"], 1, drained["reasons"])
    assert seconds(still["since"]) == pytest.approx(seconds(drained["since"]), abs=0.01)
    node.cli("start", "b")
    assert node.wait_state("b", "ready", 1)["pid"] == drained["pid"]


def test_a_changed_configuration_is_applied_gracefully_by_the_next_daemon(node: SupervisedNode) -> None:
    node.configure("a")
    node.start()
    before = node.wait_state("a", "ready")
    old = node.pid
    node.configure("a", args={"max-model-len": 4096})
    node.machine.run("systemctl", "restart", UNIT)
    node.wait_new_daemon(old)
    after = node.wait_state("a", "ready", 2)
    assert after["pid"] != before["pid"]
    (left,), (drained,) = node.events("leftover"), node.events("draining")
    assert "ended: it is not wanted as it runs" in left["event"]
    assert drained["event"].startswith("a is draining up to 2 s: left by an earlier daemon")


def test_a_restart_that_was_under_way_is_no_crash(node: SupervisedNode) -> None:
    node.mood(ignore_sigterm=True)
    node.configure("a", stop_timeout_s=3, drain_timeout_s=0)
    node.start()
    node.wait_state("a", "ready")
    node.cli("restart", "a")
    node.wait_state("a", "stopping")
    old = node.pid
    node.kill(old)
    node.wait_new_daemon(old)
    node.mood()
    after = node.wait_state("a", "ready", 2)
    assert after["last_exit"]["class"] == "stopped"


def seconds(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
