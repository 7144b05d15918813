"""The unit, checked without running it: what systemd says of it, and what it must and must not have."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.systemd_249 import KEYS

UNITS = Path(__file__).resolve().parents[2] / "units"
SERVICE = UNITS / "vllm-supervisor.service"


def settings(unit: Path) -> Iterator[tuple[str, str, str]]:
    section = ""
    for line in unit.read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            key, equals, value = line.partition("=")
            assert equals, line
            yield section, key, value


def values(key: str) -> list[str]:
    return [value for _, name, value in settings(SERVICE) if name == key]


@pytest.fixture
def units(tmp_path: Path) -> list[Path]:
    """The units with a program that exists here, so that the words of systemd-analyze are about the units alone."""
    copies = []
    for unit in (SERVICE, UNITS / "vllm.slice"):
        copies.append(tmp_path / unit.name)
        copies[-1].write_text(unit.read_text().replace("=/usr/bin/vllm-supervisor", "=/bin/true"))
    return copies


@pytest.mark.parametrize("unit", [SERVICE, UNITS / "vllm.slice"], ids=lambda path: path.name)
def test_only_keys_that_the_oldest_systemd_knows(unit: Path) -> None:
    assert [(section, key) for section, key, _ in settings(unit) if key not in KEYS[section]] == []


def test_systemd_has_nothing_to_say(units: list[Path]) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, units)], capture_output=True, text=True, check=False
    )
    assert (done.stderr, done.stdout, done.returncode) == ("", "", 0)


def test_exposure(units: list[Path]) -> None:
    command = ["systemd-analyze", "security", "--no-pager", "--threshold=40", "--offline=true", str(units[0])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-300:] + done.stderr


def test_notify_watchdog_and_restart() -> None:
    one = {key: value for _, key, value in settings(SERVICE)}
    expected = {
        "Type": "notify",
        "NotifyAccess": "main",
        "WatchdogSec": "30",
        "Restart": "always",
        "RestartPreventExitStatus": "2 75",
        "StartLimitIntervalSec": "0",
        "KillMode": "mixed",
        "OOMPolicy": "continue",
        "StateDirectory": "vllm-supervisor",
        "RuntimeDirectory": "vllm-supervisor",
        "RuntimeDirectoryPreserve": "yes",
        "LimitCORE": "0",
    }
    assert {key: one.get(key) for key in expected} == expected


def test_a_bus_and_the_persistence_daemon_come_first() -> None:
    after = " ".join(values("After")).split()
    assert {"dbus.service", "nvidia-persistenced.service"} <= set(after)
    assert "nvidia-persistenced.service" in " ".join(values("Wants")).split()
    # An engine's unit is ordered before the daemon's: the daemon after its slice would be a deadlock with READY.
    assert not {name for name in after if name.startswith("vllm")}


@pytest.mark.parametrize(
    "key",
    [
        "DeviceAllow",
        "DevicePolicy",
        "PrivateDevices",
        "ProtectClock",
        "ProtectKernelLogs",
        "MemoryDenyWriteExecute",
        "PrivateNetwork",
        "PrivateUsers",
        "DynamicUser",
        "User",
    ],
)
def test_what_would_close_gpus_or_the_kernel_log_is_left_out(key: str) -> None:
    assert values(key) == []


def test_capabilities_that_are_needed() -> None:
    assert set(" ".join(values("CapabilityBoundingSet")).split()) == {
        f"CAP_{name}"
        for name in (
            *("SETUID", "SETGID", "CHOWN", "FOWNER", "DAC_OVERRIDE", "DAC_READ_SEARCH", "KILL"),
            *("LEASE", "SYSLOG", "SYS_ADMIN", "SYS_PTRACE"),
        )
    }


def test_gateways_and_prometheus_reach_it_over_both_kinds_of_addresses() -> None:
    assert {"AF_INET", "AF_INET6"} <= set(" ".join(values("RestrictAddressFamilies")).split())
    assert [key for _, key, _ in settings(SERVICE) if key.startswith(("IPAddress", "SocketBind"))] == []


@pytest.mark.parametrize(
    ("unit", "kept"),
    [
        ("vllm-supervisor.service", True),
        ("vllm-engine-qwen.service", True),
        ("nginx.service", False),
        ("my-vllm-supervisor.service", False),
    ],
)
def test_needrestart_leaves_us_alone(unit: str, kept: bool) -> None:
    program = """my %nrconf = (override_rc => {}); my ($file, $unit) = @ARGV;
    eval do { local(@ARGV, $/) = $file; <> }; die $@ if $@;
    print join ",", map { $unit =~ /$_/ ? $nrconf{override_rc}->{$_} : () } keys %{$nrconf{override_rc}};"""
    command = ["perl", "-w", "-e", program, str(UNITS / "vllm-supervisor.needrestart"), unit]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("0" if kept else "", "")
