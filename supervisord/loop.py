"""The loop: the only writer of state. One observation, one step, its actions, one watchdog ping; it never waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Condition
from typing import Final, Protocol

from supervisord.core import node as reducer
from supervisord.core.messages import Action, Due, Finish, Observation, What
from supervisord.core.model import Node

UNBOOTED: Final = 1
"""The serial number of the snapshot from before the first turn: nothing that lives is in it yet."""

IDLE_TURN_S: Final = 5.0
"""A turn happens at least this often, whatever the schedule does: the watchdog is fed after turns only."""

Inbox = SimpleQueue[Observation]
Observe = Callable[[Node, Observation, float], None]


class Effects(Protocol):
    """Where a turn goes. Every method returns at once; results come back through the inbox."""

    def begin(self, old: Node, new: Node) -> None:
        """The core has decided: persist and publish, before anything is done or answered."""

    def perform(self, action: Action, node: Node) -> None:
        """Set one action in motion."""

    def end(self, node: Node) -> None:
        """The turn is complete: feed the watchdog."""


class Board:
    """The published snapshot: readers on any thread get an immutable node, and can wait for a newer one."""

    def __init__(self, node: Node) -> None:
        self._changed = Condition()
        self._serial = UNBOOTED
        self._node = node

    def publish(self, node: Node) -> None:
        """Show a new node."""
        with self._changed:
            self._node = node
            self._serial += 1
            self._changed.notify_all()

    def read(self) -> tuple[int, Node]:
        """The newest snapshot and its serial number."""
        with self._changed:
            return self._serial, self._node

    def booted(self) -> bool:
        """Whether the snapshot knows what lives."""
        return self.read()[0] > UNBOOTED

    def wait(self, after: int, timeout_s: float) -> tuple[int, Node]:
        """The newest snapshot, as soon as its serial is greater than `after`, at the latest after `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._serial > after, timeout_s)
            return self._serial, self._node


class Loop:
    """Takes observations one at a time and lets the core decide.

    `observe` hears of each before that, with the node as it is and the time: what it takes to decide the same again.
    `timed` hears of each turn how many seconds it took.
    """

    def __init__(
        self,
        node: Node,
        inbox: Inbox,
        effects: Effects,
        clock: Callable[[], float] = time.monotonic,
        observe: Observe | None = None,
        timed: Callable[[float], None] | None = None,
    ) -> None:
        self.node = node
        self._inbox = inbox
        self._effects = effects
        self._clock = clock
        self._observe = observe
        self._timed = timed
        self.finished = False

    def run(self) -> None:
        """Turn until the core says that nothing of ours runs any more."""
        while not self.finished:
            self.turn(self._next())

    def turn(self, seen: Observation) -> None:
        """One complete turn."""
        old, now = self.node, self._clock()
        if self._observe is not None:
            self._observe(old, seen, now)
        self.node, actions = reducer.step(old, seen, now)
        self._effects.begin(old, self.node)
        for action in actions:
            if isinstance(action, Finish):
                self.finished = True
            else:
                self._effects.perform(action, self.node)
        self._effects.end(self.node)
        if self._timed is not None:
            self._timed(self._clock() - now)

    def _next(self) -> Observation:
        wakeup = reducer.wakeup(self.node)
        wait_s = IDLE_TURN_S if wakeup is None else min(wakeup - self._clock(), IDLE_TURN_S)
        if wait_s <= 0:
            return Due(What.CLOCK)
        try:
            return self._inbox.get(timeout=wait_s)
        except Empty:
            return Due(What.CLOCK if wait_s < IDLE_TURN_S else What.WATCHDOG)
