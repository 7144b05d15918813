"""Checks of the supervisor itself: configuration, daemon, unit, systemd, needrestart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from supervisord import __version__
from supervisord.config_problems import printable
from supervisord.doctor.facts import Facts, Unknown
from supervisord.doctor.findings import Finding, count, fail, listed, not_checked, ok, warn
from supervisord.effects import EXTENDED_S
from supervisord.launcher.service import DAEMON

SYSTEMD_MIN: Final = 249
"""Ubuntu 22.04; the unit uses its keys only."""

_SPAN: Final = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)(us|ms|s|min|h|d|w|month|y)")
_UNITS_S: Final = {"us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "d": 86400, "w": 604800, "month": 2629800}
_SHOWN: Final = 5
_NEEDRESTART: Final = "/etc/needrestart/conf.d"


def configuration(facts: Facts) -> Iterator[Finding]:
    """Whether the daemon would take it."""
    path, found = facts.config_path, facts.config
    if isinstance(found, Unknown):
        if found.code == "missing":
            remedy = f"write it ({path}; docs/examples has some), or name another one with --config"
            yield fail(f"there is no configuration: {found.why}", remedy)
        elif found.code == "denied":
            yield not_checked(found.why, "run this as root, or as a member of vllm-admin")
        else:
            yield fail(f"the configuration cannot be read: {found.why}", "look at the disks that it names")
        return
    remedy = f"vllm-supervisor check-config {path}"
    for problem in found.problems[:_SHOWN]:
        yield fail(
            f"cannot use {problem.where}: {problem.message}" if problem.path else problem.message,
            problem.remedy or remedy,
        )
    for warning in found.loaded.warnings[:_SHOWN]:
        yield warn(warning, remedy)
    more = max(0, len(found.problems) - _SHOWN) + max(0, len(found.loaded.warnings) - _SHOWN)
    if more:
        yield warn(f"and {count(more, 'problem or warning', 'problems and warnings')} more", remedy)
    if not found.problems and not found.loaded.warnings:
        yield ok(f"{path} is valid; engines: {listed(facts.node.engines) or 'none'}")


def daemon(facts: Facts) -> Iterator[Finding]:
    """Whether it runs, is of this version, and uses the configuration that is there."""
    found = facts.daemon
    if isinstance(found, Unknown):
        if found.code == "down":
            installed = not isinstance(facts.unit, Unknown) and facts.unit.get("LoadState") == "loaded"
            by_hand = f"vllm-supervisor run --config {facts.config_path}"
            yield warn("the daemon does not run", "systemctl start vllm-supervisor" if installed else by_hand)
        elif found.code == "denied":
            yield not_checked(found.why, "run this as root, or as a member of vllm-admin")
        else:
            yield fail(f"the daemon does not answer as it should: {found.why}", "journalctl -u vllm-supervisor -n 50")
        return
    told = found["supervisor"]
    version = printable(str(told.get("version")))
    if told.get("config_error"):
        text = f"the configuration on disk is not in force: {told['config_error']}"
        yield warn(text, "mend it, then: systemctl reload vllm-supervisor")
    if version != __version__:
        yield warn(
            f"the daemon is of version {version}, this command of {__version__}", "systemctl restart vllm-supervisor"
        )
    elif not told.get("config_error"):
        yield ok(f"vllm-supervisor {version} runs, pid {told.get('pid')}, launcher {told.get('launcher')}")


def systemd(facts: Facts) -> Iterator[Finding]:
    """Whether systemd can run engines as services."""
    if not facts.box.has_systemd:
        yield not_checked("systemd does not run this machine: engines can only be children of the daemon")
        return
    first = (facts.box.run(("systemctl", "--version")) or "").partition("\n")[0]
    found = re.match(r"systemd (\d{1,9})", first)
    if found is None:
        yield fail("systemctl --version does not answer", "systemctl status; a machine in this state needs a reboot")
    elif int(found[1]) < SYSTEMD_MIN:
        yield fail(f"systemd {found[1]} is older than {SYSTEMD_MIN}", 'upgrade the system, or set launcher = "plain"')
    elif not facts.box.path("/sys/fs/cgroup/cgroup.controllers").exists():
        text = f"systemd {found[1]} without the unified cgroup hierarchy: engines can only be children of the daemon"
        yield warn(text, "boot with systemd.unified_cgroup_hierarchy=1")
    elif _keeps_no_journal(facts):
        text = "journald keeps nothing (Storage=none): what engines say of why they end is lost, and `logs` is empty"
        yield warn(text, "set Storage=auto in /etc/systemd/journald.conf; systemctl restart systemd-journald")
    else:
        yield ok(f"systemd {found[1]}")


def _keeps_no_journal(facts: Facts) -> bool:
    told = facts.box.run(("systemd-analyze", "cat-config", "systemd/journald.conf")) or ""
    storage = [value for name, _, value in (line.partition("=") for line in told.splitlines()) if name == "Storage"]
    return storage[-1:] == ["none"]


def unit(facts: Facts) -> Iterator[Finding]:
    """Whether the unit is installed, enabled and not failed."""
    if isinstance(facts.unit, Unknown):
        if facts.unit.code != "absent":
            yield not_checked(facts.unit.why)
        return
    said = facts.unit
    if said.get("LoadState") != "loaded":
        yield warn(f"{DAEMON} is not installed ({said.get('LoadState')})", "install the package (scripts/build-deb)")
        return
    if said.get("ActiveState") == "failed":
        text = f"{DAEMON} has failed ({said.get('Result')}, exit code {said.get('ExecMainStatus')})"
        yield fail(text, f"journalctl -u {DAEMON} -n 50; mend that, then: systemctl restart {DAEMON}")
    if said.get("UnitFileState") != "enabled":
        yield warn(
            f"{DAEMON} is {said.get('UnitFileState') or 'not enabled'}: it does not start at boot",
            f"systemctl enable {DAEMON}",
        )
    if said.get("NeedDaemonReload") == "yes":
        yield warn(f"{DAEMON} was changed on disk since systemd read it", "systemctl daemon-reload")
    if said.get("ActiveState") != "failed" and said.get("UnitFileState") == "enabled":
        yield ok(f"{DAEMON} is enabled and {said.get('ActiveState')} ({said.get('SubState')})")


def stop_time(facts: Facts) -> Iterator[Finding]:
    """Whether systemd leaves the daemon the time to end its engines.

    While it does, it asks for EXTENDED_S more again and again, so the limit need not cover stop_timeout_s.
    """
    if isinstance(facts.unit, Unknown) or facts.unit.get("LoadState") != "loaded":
        return
    told = facts.unit.get("TimeoutStopUSec", "")
    limit_s = seconds(told)
    longest = max((spec.drain_timeout_s + spec.stop_timeout_s for spec in facts.engines), default=0.0)
    if limit_s is not None and limit_s < EXTENDED_S:
        text = f"TimeoutStopSec is {told}: systemd may kill the daemon before it has asked for more time"
        yield warn(text, "systemctl edit vllm-supervisor: TimeoutStopSec=120")
    else:
        needs = f" (drain and stop: up to {longest:g} s)" if longest else ""
        yield ok(f"TimeoutStopSec is {told}, prolonged while engines end{needs}")


def needrestart(facts: Facts) -> Iterator[Finding]:
    """Whether an upgraded library would restart models that serve."""
    box = facts.box
    if not box.path("/etc/needrestart").is_dir():
        yield ok("needrestart is not installed")
        return
    rules = [box.text(f"{_NEEDRESTART}/{name}") or "" for name in box.names(_NEEDRESTART) if name.endswith(".conf")]
    wanted = ("vllm-supervisor", "vllm-engine-")
    if all(any(word in rule for rule in rules) for word in wanted):
        yield ok("needrestart leaves the supervisor and its engines alone")
    else:
        text = "needrestart may restart the supervisor after an upgrade of a library"
        remedy = (
            f"install the package, or copy units/vllm-supervisor.needrestart to {_NEEDRESTART}/vllm-supervisor.conf"
        )
        yield warn(text, remedy)


def seconds(span: str) -> float | None:
    """A time span as systemctl shows it ("1min 30s"); None for infinity and for what is none."""
    parts = _SPAN.findall(span)
    return sum(float(number) * _UNITS_S.get(unit, 0.0) for number, unit in parts) if parts else None
