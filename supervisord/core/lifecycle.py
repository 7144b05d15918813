"""Which state may follow which, and when a state has to be looked at again.

The documentation draws its state diagram from here. Entering a state in a way that the table does not know is a bug of
ours, never of the world.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from supervisord.core.model import (
    Backoff,
    Draining,
    Engine,
    Ready,
    Starting,
    State,
    Stopping,
    Waiting,
    Warming,
)
from supervisord.core.watch import canary_deadline

MEMORY_BACK_S: Final = 30.0
"""GPU memory comes back within 0.2 s, on the other GPUs of a killed rank within 9."""

TRANSITIONS: Final[Mapping[State, frozenset[State]]] = {
    # A starting daemon finds an engine that serves in any state, or in a back-off that is not over: it begins with
    # STOPPED, or a remembered FAILED.
    State.STOPPED: frozenset({State.WAITING, State.STARTING, State.DRAINING, State.STOPPING, State.BACKOFF}),
    State.WAITING: frozenset({State.STOPPED, State.STARTING, State.STOPPING, State.BACKOFF, State.FAILED}),
    State.STARTING: frozenset({State.WAITING, State.WARMING, State.READY, State.STOPPING, State.BACKOFF, State.FAILED}),
    State.WARMING: frozenset({State.READY, State.STOPPING}),
    State.READY: frozenset({State.DRAINING, State.STOPPING}),
    State.DRAINING: frozenset({State.READY, State.STOPPING}),
    State.STOPPING: frozenset({State.STOPPED, State.WAITING, State.STARTING, State.BACKOFF, State.FAILED}),
    State.BACKOFF: frozenset({State.STOPPED, State.WAITING, State.STARTING}),
    State.FAILED: frozenset({State.STOPPED, State.WAITING, State.STARTING, State.DRAINING, State.STOPPING}),
}


class IllegalTransitionError(Exception):
    """A bug: the reducer tried to leave the state diagram."""


def check(old: State, new: State) -> None:
    """Raise IllegalTransitionError unless `new` may follow `old` (staying is always allowed)."""
    if new is not old and new not in TRANSITIONS[old]:
        raise IllegalTransitionError(f"{old.value} -> {new.value}")


def deadlines(engine: Engine) -> Iterator[float]:
    """When this engine has to be looked at again, whatever happens (monotonic seconds)."""
    phase = engine.phase
    match phase:
        case Waiting(recheck_at=at) | Backoff(until=at) | Warming(give_up_at=at):
            yield at
        case Starting():
            yield min(phase.give_up_at, phase.progress_at + engine.spec.start_timeout_s)
        case Draining():
            yield phase.next_look_at
            if phase.until is not None:
                yield phase.until
        case Stopping():
            yield from _of_stopping(engine, phase)
        case Ready():
            yield from _of_ready(engine, phase)
        case _:
            pass  # stopped and failed: resting places


def _of_ready(engine: Engine, phase: Ready) -> Iterator[float]:
    if phase.next_look_at is not None:
        yield phase.next_look_at
    outlived = canary_deadline(engine.watch, engine.spec.probe) if engine.watch is not None else None
    if outlived is not None:
        yield outlived


def _of_stopping(engine: Engine, phase: Stopping) -> Iterator[float]:
    yield phase.give_up_at
    if phase.gone_at is not None:
        return
    if phase.sweep_at is not None:
        yield phase.sweep_at
    elif engine.launching is None and not phase.exited and not phase.sweeping:
        yield phase.kill_at
        if phase.repeat_at is not None:
            yield phase.repeat_at
