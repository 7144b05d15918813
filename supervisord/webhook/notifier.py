"""Tells receivers of events: a queue and a thread for each, so nothing waits for them, nor they for each other."""

from __future__ import annotations

import random
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from itertools import count
from threading import Condition, Lock, Thread
from typing import Final

from supervisord.config_problems import bare_urls
from supervisord.core import kinds
from supervisord.core.messages import Record
from supervisord.core.spec import NotifySpec
from supervisord.webhook.notice import Notice, body
from supervisord.webhook.outbox import Outbox, Outcome, Stats

FLUSH_S: Final = 2.0
"""How long the end of the daemon, or of a receiver, waits for what is not delivered yet."""

Tell = Callable[[Record], None]
Send = Callable[[NotifySpec, bytes, float], Outcome]


class Webhooks:
    """All receivers; none until `use`."""

    def __init__(self) -> None:
        self._node = socket.gethostname()
        self._ids = count(1)
        self._daemon = secrets.token_hex(6)
        self._changing = Lock()
        self._receivers: dict[str, _Receiver] = {}

    def use(self, specs: Mapping[str, NotifySpec], tell: Tell) -> list[str]:
        """Tell these receivers from now on; a sentence for each that is another one than before.

        `tell` hears when one fails and works again, on that receiver's thread.
        """
        changes = []
        with self._changing:
            receivers = {}
            for name, spec in specs.items():
                known = self._receivers.get(name)
                if known is None:
                    changes.append(f"notify.{name}: is new: told from now on")
                    known = _Receiver(spec, self._node, tell)
                elif known.configure(spec):
                    changes.append(f"notify.{name}: its settings changed: used from now on")
                receivers[name] = known
            gone = [receiver for name, receiver in self._receivers.items() if name not in specs]
            self._receivers = receivers  # replaced as a whole: whoever offers meanwhile sees the old or the new ones
        for receiver in gone:
            receiver.end(time.monotonic() + FLUSH_S)
            changes.append(f"notify.{receiver.name}: is no longer configured: told nothing more")
        return changes

    def offer(self, record: Record) -> None:
        """Tell those who want to know. Never waits; for any thread."""
        wanting = [receiver for receiver in self._receivers.values() if receiver.wants(record)]
        if wanting:
            notice = Notice(f"{self._daemon}-{next(self._ids)}", time.time(), record)
            for receiver in wanting:
                receiver.offer(notice)

    def stats(self) -> dict[str, Stats]:
        """Counters by receiver, for metrics."""
        return {name: receiver.stats() for name, receiver in self._receivers.items()}

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Deliver what waits, all receivers at the same time and within bounds; tell what is lost."""
        until = time.monotonic() + timeout_s
        receivers = list(self._receivers.values())
        for receiver in receivers:
            receiver.end(until)
        for receiver in receivers:
            receiver.join(until)


class _Receiver:
    """One of them, and its thread."""

    def __init__(self, spec: NotifySpec, node: str, tell: Tell) -> None:
        self.name = spec.name
        self._spec = spec
        self._kinds = kinds.named(spec.events)
        self._node = node
        self._tell = tell
        self._outbox = Outbox(f"notify.{spec.name}", bare_urls(spec.url), spec.repeat_s, random.random)
        self._wake = Condition()
        self._until: float | None = None
        """When it has to have ended; None: not yet."""
        self._thread = Thread(target=self._run, name=f"notify-{spec.name}", daemon=True)
        self._thread.start()

    # --- any thread -----------------------------------------------------------------------------------------------

    def configure(self, spec: NotifySpec) -> bool:
        """Go on with other settings, also with what waits; False when they are the same."""
        with self._wake:
            if spec == self._spec:
                return False
            self._spec = spec
            self._kinds = kinds.named(spec.events)
            self._outbox.configure(bare_urls(spec.url), spec.repeat_s)
            self._wake.notify()
        return True

    def wants(self, record: Record) -> bool:
        """Whether it is to be told of this; never of its own trouble, which it would only be told too late."""
        return record.kind in self._kinds and record.numbers.get("receiver") != f"notify.{self.name}"

    def offer(self, notice: Notice) -> None:
        """Queue it."""
        with self._wake:
            if self._until is None:
                self._outbox.offer(notice, time.monotonic())
                self._wake.notify()

    def stats(self) -> Stats:
        """Count."""
        with self._wake:
            return self._outbox.stats()

    def end(self, until: float) -> None:
        """Try once more what waits, and end, at the latest at `until` (monotonic)."""
        with self._wake:
            self._until = until
            self._outbox.hurry(time.monotonic())
            self._wake.notify()

    def join(self, until: float) -> None:
        """Wait for that."""
        self._thread.join(max(0.0, until - time.monotonic()))
        self._finish()

    # --- its thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        from supervisord.webhook.post import send  # noqa: PLC0415 (requests: memory that only receivers cost)

        while (notice := self._next()) is not None:
            outcome = self._attempt(send, notice)
            with self._wake:
                self._outbox.settle(outcome, time.monotonic())
        self._finish()

    def _next(self) -> Notice | None:
        """Wait for a message that is due, and meanwhile tell what is news of the receiver; None: the end."""
        while True:
            with self._wake:
                now = time.monotonic()
                notice, news, until = self._outbox.take(now), self._outbox.news(), self._until
                if notice is None and not news and until is None:
                    wakeup = self._outbox.wakeup()
                    self._wake.wait(None if wakeup is None else max(0.0, wakeup - now))
            for record in news:
                self._tell(record)
            if until is not None:
                return notice if now < until else None
            if notice is not None:
                return notice

    def _attempt(self, send: Send, notice: Notice) -> Outcome:
        spec, until = self._spec, self._until
        left_s = spec.timeout_s if until is None else min(spec.timeout_s, max(0.0, until - time.monotonic()))
        try:
            return send(spec, body(notice, self._node), left_s)
        except Exception as error:  # noqa: BLE001 - a bug must not end the thread; its text may quote a secret
            return Outcome(ok=False, detail=f"internal error: {type(error).__name__}; please report it")

    def _finish(self) -> None:
        with self._wake:
            self._outbox.close()
            news = self._outbox.news()
        for record in news:
            self._tell(record)
