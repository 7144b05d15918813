"""Checks of ports, and of time limits against what starts have really taken."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from supervisord.config_checks import host_and_port
from supervisord.control.client import ControlError, RefusedError, get
from supervisord.core.spec import EngineSpec
from supervisord.doctor import survivors
from supervisord.doctor.facts import ASK_S, Facts, Unknown
from supervisord.doctor.findings import Finding, count, fail, not_checked, ok, warn
from supervisord.history_read import Reader, UnreadableError, document
from supervisord.history_store import FILE, BrokenError
from supervisord.launcher.base import GateError, LaunchError
from supervisord.launcher.ports import check_free, ownership

_NEAR: Final = 0.8
"""A start that took this part of its limit will be ended some day, when the disk is busier."""
_EVENTS: Final = 500
_STARTS: Final = 10
"""The newest that count: what was slow long ago may be mended."""
_SETTLED: Final = frozenset({"ready", "draining"})
"""States in which the daemon has proved that the port is the engine's own."""


def ports(facts: Facts) -> Iterator[Finding]:
    """Whether each engine can have its port, or has it."""
    known = survivors.pids_of(facts)
    for spec in facts.engines:
        yield _port(spec, facts, known)
    own = host_and_port(facts.node.supervisor.listen)
    if own is not None and isinstance(facts.daemon, Unknown) and facts.daemon.code == "down":
        wrong = _taken(*own)
        yield fail(*wrong, "supervisor.listen") if wrong else ok(f"port {own[1]} is free", "supervisor.listen")


def _port(spec: EngineSpec, facts: Facts, known: Mapping[str, set[int]] | None) -> Finding:
    about = f"engine {spec.name}"
    wrong = _taken(spec.host, spec.port)
    if wrong is None:
        return ok(f"port {spec.port} is free", about)
    pids = (known or {}).get(spec.name, set())
    settled = _told_of(spec, facts).get("state") in _SETTLED
    if pids and (settled or ownership(pids, spec.host, spec.port).ours):
        down = isinstance(facts.daemon, Unknown) and facts.daemon.code == "down"
        later = "; it outlives its daemon, the next one adopts it" if down else ""
        return ok(f"port {spec.port} is the engine's own (pid {min(pids)}){later}", about)
    if known is None:
        text = f"port {spec.port} is in use, and only root and the daemon know whether by the engine"
        return not_checked(text, subject=about)
    return fail(*wrong, about)


def _taken(host: str, port: int) -> tuple[str, str] | None:
    """Who has it and what to do; None when it is free."""
    try:
        check_free(host, port)
    except (GateError, LaunchError) as error:
        message, _, remedy = str(error).partition("; ")
        return message, remedy
    return None


def _told_of(spec: EngineSpec, facts: Facts) -> Mapping[str, Any]:
    if isinstance(facts.daemon, Unknown):
        return {}
    return next((engine for engine in facts.daemon["engines"] if engine.get("name") == spec.name), {})


def start_times(facts: Facts) -> Iterator[Finding]:
    """start_timeout_max_s and start_timeout_s against the starts that the history knows."""
    for spec in facts.engines:
        about = f"engine {spec.name}"
        try:
            events = _events(spec.name, facts)
        except (UnreadableError, BrokenError, ControlError) as error:
            yield not_checked(str(error), "run this as root, or as a member of vllm-admin", about)
        else:
            yield _judged(spec, events, about)


def _judged(spec: EngineSpec, events: Iterable[Mapping[str, Any]], about: str) -> Finding:
    starts = list(_starts(events).values())[-_STARTS:]
    took = [seconds for seconds in starts if seconds is not None]
    ended = len(starts) - len(took)
    limit = spec.start_timeout_max_s
    if not starts:
        return not_checked("no start of it is in the history yet", subject=about)
    span = f"{count(len(took), 'start')} took {_span(took)}" if took else "none came to an end"
    if ended:
        text = f"start_timeout_s or start_timeout_max_s ended {ended} of the last {count(len(starts), 'start')}; {span}"
        remedy = (
            f"vllm-supervisor why {spec.name}; if it is only slow, raise start_timeout_s ({spec.start_timeout_s:g})"
        )
        return warn(text, remedy, about)
    if max(took) > _NEAR * limit:
        text = f"{span}, and start_timeout_max_s ends one after {limit:g} s"
        return warn(text, f"start_timeout_max_s = {2 * max(took):.0f}", about)
    return ok(f"{span}; start_timeout_s is {spec.start_timeout_s:g} without progress, {limit:g} in all", about)


def _starts(events: Iterable[Mapping[str, Any]]) -> dict[object, float | None]:
    """Seconds until an engine answered, by generation, oldest first; None: a time limit ended that start."""
    found: dict[object, float | None] = {}
    for event in events:
        numbers = event.get("numbers")
        seconds = numbers.get("took_s") if isinstance(numbers, dict) else None
        if event.get("kind") == "answering" and isinstance(seconds, int | float):
            found[event.get("generation")] = float(seconds)
        elif event.get("reason") == "start_timeout":
            found[event.get("generation")] = None
    return found


def _span(took: list[float]) -> str:
    least, most = f"{min(took):.0f}", f"{max(took):.0f}"
    return f"{most} s" if least == most else f"{least} to {most} s"


def _events(engine: str, facts: Facts) -> list[Mapping[str, Any]]:
    """The newest events of an engine. Raises UnreadableError, BrokenError, ControlError."""
    if not isinstance(facts.daemon, Unknown):
        try:
            page = get(facts.socket, f"/v1/events?engine={engine}&limit={_EVENTS}", ASK_S).document()
        except RefusedError:  # it does not know this engine
            return []
        found = page.get("events")
        return [event for event in found if isinstance(event, dict)] if isinstance(found, list) else []
    path = Path(facts.node.supervisor.state_dir, FILE)
    try:
        there = path.exists()
    except OSError as error:
        raise UnreadableError(f"cannot look for the history {path}: {error.strerror}") from None
    if not there:
        return []
    return [document(event, "") for event in Reader(path, ASK_S).page(engine, None, None, _EVENTS).events]
