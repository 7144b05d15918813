"""The working copy of one step: what the reducer's parts change the node through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from supervisord.core import lifecycle
from supervisord.core.messages import Action, Record, Severity
from supervisord.core.model import STATE_OF, Engine, Node, Phase, Reason

Number = float | int | str | None


class Turn:
    """One step under way. Mutable inside the step, invisible outside of it."""

    __slots__ = ("_engines", "actions", "node", "now")

    def __init__(self, node: Node, now: float) -> None:
        self.node = node
        self.now = now
        self.actions: list[Action] = []
        self._engines: dict[str, Engine] | None = None

    def engines(self) -> tuple[Engine, ...]:
        """All engines as they stand now."""
        return tuple(self._current().values())

    def engine(self, name: str) -> Engine | None:
        """One engine as it stands now."""
        return self._current().get(name)

    def put(self, engine: Engine) -> Engine:
        """Keep a changed engine."""
        self._writable()[engine.spec.name] = engine
        return engine

    def forget(self, name: str) -> None:
        """Drop an engine of which nothing lives."""
        self._writable().pop(name, None)

    def enter(self, engine: Engine, phase: Phase) -> Engine:
        """Move an engine into a phase that the state diagram allows; `since` moves only with the state."""
        new = STATE_OF[type(phase)]
        lifecycle.check(engine.state, new)
        since = engine.since if new is engine.state else self.now
        return self.put(replace(engine, phase=phase, since=since))

    def do(self, action: Action) -> None:
        """Ask for something to be done after the step."""
        self.actions.append(action)

    def record(
        self,
        kind: str,
        engine: Engine | None,
        message: str,
        *,
        severity: Severity = Severity.INFO,
        reason: Reason | str | None = None,
        **numbers: Number,
    ) -> None:
        """Tell people what was decided, once, with its numbers."""
        self.do(
            Record(
                kind=kind,
                message=message,
                severity=severity,
                engine=engine.spec.name if engine else None,
                generation=(engine.launching or engine.generation) if engine else None,
                reason=reason.code if isinstance(reason, Reason) else reason,
                numbers=numbers,
            )
        )

    def result(self) -> tuple[Node, tuple[Action, ...]]:
        """The new node and what is to be done."""
        node = self.node
        if self._engines is not None:
            node = replace(node, engines=self._engines)
        return node, tuple(self.actions)

    def _current(self) -> Mapping[str, Engine]:
        return self._engines if self._engines is not None else self.node.engines

    def _writable(self) -> dict[str, Engine]:
        if self._engines is None:
            self._engines = dict(self.node.engines)
        return self._engines
