"""Checks for what would start, stop or restart vLLM beside the supervisor: units, cron, other supervisors, processes.

An engine that two own is started twice and killed under each other's hands. Names only make a warning, never more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from supervisord.doctor import survivors
from supervisord.doctor.box import Box
from supervisord.doctor.facts import Facts
from supervisord.doctor.findings import Finding, listed, not_checked, ok, warn

_SERVES: Final = re.compile(r"\bvllm['\"]?\s+serve\b|\bvllm\.entrypoints\b")
_VLLM: Final = re.compile(r"\bvllm(?!-supervisor)\b")
_SHOWN: Final = 4
_OURS: Final = re.compile(r"vllm-supervisor\.service|vllm-engine-[a-z0-9_-]{1,32}\.service")
_UNITS: Final = (
    "/etc/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
)
_CRON: Final = ("/etc/cron.d", "/etc/cron.hourly", "/etc/cron.daily", "/var/spool/cron/crontabs", "/var/spool/cron")
_OTHERS: Final = ("/etc/supervisor/conf.d", "/etc/supervisord.d", "/etc/supervisor", "/etc")
_SUPERVISORD: Final = re.compile(r"supervisord?\.conf|.+\.(?:conf|ini)")


def units(facts: Facts) -> Iterator[Finding]:
    """Units that start `vllm serve` and are not ours."""
    found: dict[str, str] = {}
    for folder in _UNITS:
        for name in facts.box.names(folder):
            if not name.endswith(".service") or _OURS.fullmatch(name):
                continue
            text = facts.box.text(f"{folder}/{name}") or ""
            starts = [line for line in text.replace("\\\n", " ").splitlines() if line.startswith("ExecStart")]
            if any(_SERVES.search(line) for line in starts):
                found.setdefault(name, f"{folder}/{name}")
    enabled = {name for name in found if _enabled(facts, name)}
    for name in sorted(enabled):
        text = f"{found[name]} starts vLLM at boot, beside the supervisor"
        yield warn(text, f"systemctl disable --now {name}; write it as an engine (docs/guide.md)")
    if not enabled:
        idle = f" ({listed(sorted(found))}: not enabled)" if found else ""
        yield ok(f"no other unit starts vLLM at boot{idle}")


def _enabled(facts: Facts, name: str) -> bool:
    """Whether a target wants it: a link in one of its folders."""
    folder = "/etc/systemd/system"
    wants = [entry for entry in facts.box.names(folder) if entry.endswith((".wants", ".requires"))]
    template = name.removesuffix("@.service")
    return any(
        link == name or (template != name and link.startswith(f"{template}@"))
        for entry in wants
        for link in facts.box.names(f"{folder}/{entry}")
    )


def cron(facts: Facts) -> Iterator[Finding]:
    """Cron jobs about vLLM: the restart scripts of a machine without a supervisor."""
    if not facts.box.is_root and facts.box.path("/var/spool/cron").is_dir():
        yield not_checked("only root may read the crontabs of all users", "run this as root")
    jobs = []
    files = ["/etc/crontab", *(f"{folder}/{name}" for folder in _CRON for name in facts.box.names(folder))]
    for file in files:
        lines = (facts.box.text(file) or "").splitlines()
        jobs += [(file, number) for number, line in enumerate(lines, 1) if _is_job(line)]
    for file, number in jobs:
        text = f"line {number} of {file} does something to vLLM by itself"
        yield warn(text, f"read it; what restarts engines has to go: the supervisor does that ({file})")
    if not jobs:
        yield ok("no cron job is about vLLM")


def _is_job(line: str) -> bool:
    return not line.lstrip().startswith("#") and _VLLM.search(line) is not None


def supervisors(facts: Facts) -> Iterator[Finding]:
    """Programs of supervisord (the other one) that start vLLM."""
    found = []
    for folder in _OTHERS:
        for name in facts.box.names(folder):
            whole = _SUPERVISORD.fullmatch(name) if folder != "/etc" else re.fullmatch(r"supervisord?\.conf", name)
            text = (facts.box.text(f"{folder}/{name}") or "") if whole else ""
            if any(line.startswith("command") and _SERVES.search(line) for line in text.splitlines()):
                found.append(f"{folder}/{name}")
    for file in found:
        yield warn(f"{file} has supervisord start vLLM", "supervisorctl stop PROGRAM; remove it from there")
    if not found:
        yield ok("supervisord starts no vLLM")


def processes(facts: Facts) -> Iterator[Finding]:
    """Processes that serve with vLLM and are no engine of ours."""
    ours = survivors.pids_of(facts)
    known = set().union(*(ours or {}).values())
    foreign = [pid for pid in facts.box.pids() if _foreign(facts.box, pid, known)]
    if not foreign:
        yield ok("no vLLM runs beside the supervisor's engines")
        return
    # No more of their command lines: there may be a key in them.
    text = f"pid {listed(map(str, foreign))}: serving with vLLM"
    if ours is None:
        yield not_checked(f"{text}; only root and the daemon know which are its engines")
        return
    some = ",".join(map(str, foreign[:_SHOWN]))
    remedy = f"ps -o pid,ppid,unit,lstart,args -p {some} says who started them; end them there"
    yield warn(f"{text}, and no engine of the supervisor", remedy)


def _foreign(box: Box, pid: int, known: set[int]) -> bool:
    """Whether a process serves with vLLM and is in no unit, and not in the session, of an engine."""
    if not _serves((box.text(f"/proc/{pid}/cmdline") or "").split("\0")):
        return False
    session = (box.text(f"/proc/{pid}/stat") or "").rpartition(") ")[2].split()[3:4]
    ours = {pid, *map(int, session)} & known
    return not ours and _OURS.search(box.text(f"/proc/{pid}/cgroup") or "") is None


def _serves(words: list[str]) -> bool:
    """Whether a command line is `.../vllm serve ...` or `python -m vllm.entrypoints....`."""
    pairs = list(pairwise(words))
    return any(
        (one.rpartition("/")[2] == "vllm" and two == "serve") or (one == "-m" and two.startswith("vllm.entrypoints"))
        for one, two in pairs
    )
