"""The package on a booted machine: its own unit in its own sandbox, with simulated engines as services."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.e2e_systemd.machine import Machine
from tests.e2e_systemd.node import CONFIG, UNIT, Asking
from tests.e2e_systemd.packaged import SLICE, PackagedNode, Packages
from tests.sim.engine import wait_until


@pytest.fixture
def node(packaged: PackagedNode) -> PackagedNode:
    return packaged


def test_it_is_up_after_the_installation(machine: Machine, packages: Packages) -> None:
    node = PackagedNode(machine)
    node.bring(packages)
    node.dpkg("-i", "/srv/old.deb")
    shown = node.machine.show(UNIT, "ActiveState", "SubState", "StatusText", "UnitFileState", "Type")
    assert shown == {
        "ActiveState": "active",
        "SubState": "running",
        "StatusText": "0 of 0 wanted engines ready",
        "UnitFileState": "enabled",
        "Type": "notify",
    }
    assert "no engines are configured" in node.machine.run("vllm-supervisor", "status").stdout.splitlines()
    assert node.machine.run("stat", "-c", "%a %G", "/run/vllm-supervisor/control.sock").stdout == "660 vllm-admin\n"


def test_doctor_knows_the_machine_as_root_and_as_anybody(node: PackagedNode) -> None:
    (pid,) = node.with_engine("a")

    def doctor(*before: str) -> dict[str, tuple[str, str]]:
        told = node.machine.run(*before, "vllm-supervisor", "doctor", "--json", check=False)
        assert told.stderr == ""
        checks = json.loads(told.stdout)["checks"]
        assert not [check for check in checks if "internal error" in check["message"]]
        return {check["name"]: (check["verdict"], check["message"]) for check in checks}

    found = doctor()
    assert found["unit"] == ("ok", f"{UNIT} is enabled and active (running)")
    assert found["port"] == ("ok", f"port 8101 is the engine's own (pid {pid})")
    assert found["rival_processes"][0] == found["stop_time"][0] == found["start_time"][0] == "ok"
    assert found["open_files"] == ("ok", "engines are services of systemd, which get what they need")
    assert found["needrestart"][0] == found["systemd"][0] == found["daemon"][0] == found["home"][0] == "ok"
    found = doctor("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    assert {found[name][0] for name in ("configuration", "daemon")} == {"not_checked"}
    assert found["unit"][0] == "ok"
    node.systemctl("disable", "--now", UNIT)
    found = doctor()
    assert found["unit"] == ("warn", f"{UNIT} is disabled: it does not start at boot")
    assert found["daemon"] == ("warn", "the daemon does not run")
    assert found["port"] == ("ok", "port 8101 is free")


def test_engines_run_as_services_outside_of_its_sandbox(node: PackagedNode) -> None:
    (pid,) = node.with_engine("a")
    assert node.status()["supervisor"]["launcher"] == "systemd"
    assert pid in node.processes("a")
    assert node.machine.show(UNIT, "StatusText")["StatusText"] == "1 of 1 wanted engines ready"
    own = node.machine.run("grep", "-E", "^(NoNewPrivs|Seccomp):", f"/proc/{node.pid}/status").stdout.split()
    assert own == ["NoNewPrivs:", "1", "Seccomp:", "2"]
    assert node.machine.members("/system.slice/vllm-supervisor.service") == [node.pid]


@pytest.mark.parametrize("step", ["upgrade", "downgrade", "restart", "kill"])
def test_no_engine_notices(node: PackagedNode, step: str) -> None:
    if step == "downgrade":
        node.dpkg("-i", "/srv/new.deb")
    steps: dict[str, Callable[[], object]] = {
        "upgrade": lambda: node.dpkg("-i", "/srv/new.deb"),
        "downgrade": lambda: node.dpkg("-i", "/srv/old.deb"),
        "restart": lambda: node.systemctl("restart", UNIT),
        "kill": lambda: node.kill(node.pid),
    }
    pids, daemon = node.with_engine("a"), node.pid
    asking: Asking = node.asking(8101)
    steps[step]()
    node.wait_new_daemon(daemon)
    assert [node.wait_state("a", "ready", 1)["pid"]] == pids
    answers, failures = asking.end()
    assert answers > 0
    assert failures == "[]"


def test_a_wedged_daemon_is_replaced_by_the_watchdog(node: PackagedNode) -> None:
    # As short as turns allow on a busy machine, which come every five seconds; the unit's own is 30.
    node.drop_in("[Service]\nWatchdogSec=10\n")
    node.systemctl("restart", UNIT)
    pids, daemon = node.with_engine("a"), node.pid
    node.kill(daemon, "STOP")
    wait_until(lambda: node.pid not in {0, daemon}, 60, "the watchdog to act")
    assert [node.wait_state("a", "ready", 1)["pid"]] == pids
    assert "Watchdog timeout" in node.machine.journal("-u", UNIT)


def test_a_reload_that_is_refused_changes_nothing(node: PackagedNode) -> None:
    pids, daemon = node.with_engine("a"), node.pid
    with node.machine.path(CONFIG).open("a") as file:
        file.write("\n[engine.a.argz]\n")
    assert node.machine.run("systemctl", "reload", UNIT, check=False).returncode != 0
    assert "did you mean args?" in node.machine.journal("-u", UNIT)
    assert (node.pid, [node.engine("a")["pid"]]) == (daemon, pids)


def test_an_upgrade_that_cannot_start_is_an_error_until_mended(node: PackagedNode) -> None:
    node.machine.write(CONFIG, "[engine]\na = 1\n", 0o640)
    told = node.dpkg("-i", "/srv/new.deb", check=False)
    assert f"cannot start {UNIT}" in told
    assert node.machine.show(UNIT, "ActiveState", "NRestarts") == {"ActiveState": "failed", "NRestarts": "0"}
    node.machine.write(CONFIG, "", 0o640)
    node.dpkg("--configure", "vllm-supervisor")
    assert node.systemctl("is-active", UNIT) == "active"


def test_without_vllm_the_first_status_says_where_its_installer_is(node: PackagedNode) -> None:
    node.configure("a", command=["/opt/vllm/bin/vllm", "serve"])
    node.systemctl("restart", UNIT)
    node.wait_state("a", "failed")
    told = node.machine.run("vllm-supervisor", "status", check=False).stdout
    installer = "/usr/share/vllm-supervisor/scripts/install-vllm"
    assert f"install vLLM ({installer} --prefix /opt/vllm)" in " ".join(told.split())
    assert node.machine.run("test", "-x", installer).returncode == 0


def test_a_daemon_that_was_stopped_stays_so(node: PackagedNode) -> None:
    node.systemctl("stop", UNIT)
    node.dpkg("-i", "/srv/new.deb")
    assert node.systemctl("is-active", UNIT, check=False) == "inactive"
    assert node.systemctl("is-enabled", UNIT) == "enabled"


def test_an_upgrade_never_ends_engines_of_the_plain_launcher(node: PackagedNode) -> None:
    node.configure("a", launcher="plain")
    node.systemctl("restart", UNIT)
    pid, daemon = node.wait_state("a", "ready")["pid"], node.pid
    assert f"systemctl restart {UNIT}" in node.dpkg("-i", "/srv/new.deb")
    assert (node.pid, node.engine("a")["pid"]) == (daemon, pid)


def test_a_reboot_brings_engines_back(node: PackagedNode) -> None:
    node.with_engine("a")
    node.machine.reboot()
    assert node.wait_state("a", "ready", 2)["generation"] == 2


def test_removal_ends_engines_and_purge_leaves_nothing(node: PackagedNode) -> None:
    node.with_engine("a", "b")
    # Nobody's but the slice's: what a daemon before this one may have left.
    node.machine.run("systemd-run", "--quiet", f"--slice={SLICE}", "--unit=vllm-engine-left", "sleep", "1000")
    node.dpkg("-r", "vllm-supervisor")
    assert node.machine.run("pgrep", "-u", "vllm", check=False).stdout == ""
    for name in ("a", "b", "left"):
        assert node.systemctl("is-active", f"vllm-engine-{name}.service", check=False) == "inactive"
    node.dpkg("-P", "vllm-supervisor")
    places = ["/etc", "/usr/bin", "/usr/lib", "/usr/share", "/var/lib", "/run/vllm-supervisor"]
    found = node.machine.run("find", *places, "-xdev", "-name", "*vllm*", check=False).stdout.splitlines()
    assert [path for path in found if "/python" not in path] == []
    assert node.machine.run("getent", "passwd", "vllm", check=False).stdout == ""
