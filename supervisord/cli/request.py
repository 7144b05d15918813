"""`start`, `stop`, `restart`, `drain`, `reset`: ask for something, and with --wait follow it to its end."""

from __future__ import annotations

import argparse
import time

from supervisord.cli import NO, OK, TIMED_OUT, complain, render
from supervisord.control.client import ANSWER_S, engine_target, get, post

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final

    Document = dict[str, Any]
    Verdict = tuple[int, str]

_DESCRIPTIONS: Final = {
    "start": "Starts an engine, or takes a drained one back into traffic.",
    "stop": "Stops an engine: it drains first, unless --now. It stays stopped until a start or a reboot.",
    "restart": "Restarts an engine: it drains first, unless --now.",
    "drain": "Takes an engine out of traffic and keeps it running, until start, stop or restart.",
    "reset": "Forgets an engine's failures; a failed one that is wanted is started again.",
}
_ACCEPT_S: Final = 30.0
_POLL_S: Final = 25.0
_TELL_S: Final = 60.0
"""Who waits hears something at least this often."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the arguments of all five."""
    for name, text in _DESCRIPTIONS.items():
        parser = subparsers.add_parser(
            name, description=f"{text} Exit code with --wait: 0 it came about, 1 it did not, 6 not within --timeout."
        )
        parser.add_argument("engine", metavar="ENGINE")
        parser.add_argument("--now", action="store_true", help="do not drain first")
        add_wait(parser)


def add_wait(parser: argparse.ArgumentParser) -> None:
    """Declare --wait and --timeout."""
    parser.add_argument("--wait", action="store_true", help="return when it has come about, or cannot")
    parser.add_argument(
        "--timeout", type=_seconds, default=0.0, metavar="SECONDS", help="with --wait: at most this long (0: for ever)"
    )


def main(args: argparse.Namespace) -> int:
    """Send the request; with --wait see what becomes of it."""
    deadline = deadline_of(args)
    target = engine_target(args.engine, args.command)
    before = find(get(args.socket, "/v1/status").document(), args.engine) if args.wait else None
    answer = post(args.socket, target, {"now": args.now}, _ACCEPT_S).document()
    print(render.clean(answer["message"]), flush=True)
    if not args.wait:
        return OK
    return follow(args.socket, Goal(args.command, args.engine, before), deadline)


def deadline_of(args: argparse.Namespace) -> float | None:
    """Monotonic time until which --wait may take."""
    return time.monotonic() + args.timeout if args.timeout > 0 else None


class Goal:
    """What is waited for. `before` is the engine as it was when the request was sent."""

    def __init__(self, op: str, name: str, before: Document | None = None) -> None:
        self.op = op
        self.name = name
        self._before = before

    def verdict(self, engine: Document | None) -> Verdict | None:
        """Exit code and words, as soon as an engine (None: forgotten) has come to rest; None until then."""
        if engine is None:
            return (OK if self.op in {"stop", "reload"} else NO), "no longer configured"
        state, told = engine["state"], render.summary(engine)
        if state == "failed":
            return NO, told
        if self.op in {"stop", "drain"}:
            if state == ("stopped" if self.op == "stop" else "draining"):
                return OK, state
            # Ready anew: somebody else wanted it back meanwhile. Stopped while draining: the same, or it ended.
            lost = (state == "ready" and self._moved(engine)) or state == "stopped"
            return (NO, told) if lost else None
        if state == "stopped":
            unwanted = self.op in {"reset", "reload"} and engine["wanted"] == "stopped"
            return (OK if unwanted else NO), state
        if state == "ready" and (self.op != "restart" or self._moved(engine)):
            return OK, told
        return None

    def _moved(self, engine: Document) -> bool:
        old = self._before
        return old is None or (old["since"], old["generation"]) != (engine["since"], engine["generation"])


def follow(socket: str, goal: Goal, deadline: float | None) -> int:
    """Watch an engine until it has come to rest, telling each state and each reason to wait on its way."""
    target, told, tell_at = "/v1/status", "", 0.0
    while True:
        reply = get(socket, target, ANSWER_S + _POLL_S)
        engine = find(reply.document(), goal.name)
        verdict = goal.verdict(engine)
        if verdict is not None:
            code, text = verdict
            if code == OK:
                print(f"{goal.name}: {text}")
            else:
                complain(f"cannot {goal.op} {goal.name}: {text}")
            return code
        now = time.monotonic()
        state, text = ("", "") if engine is None else (engine["state"], render.summary(engine))
        # How far a start has come changes all the time; why an engine waits is news.
        news = text if state == "waiting" else state
        if news != told or now >= tell_at:
            print(f"{goal.name}: {text}", flush=True)
            told, tell_at = news, now + _TELL_S
        left_s = min(_POLL_S, tell_at - now, *([] if deadline is None else [deadline - now]))
        if left_s <= 0:
            complain(f"cannot wait any longer for {goal.op} of {goal.name} (--timeout): it is {text}")
            return TIMED_OUT
        target = f"/v1/status?after={reply.number('status-serial')}&timeout={left_s:.3f}"


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def find(document: Document, name: str) -> Document | None:
    """Return one engine of a status document."""
    return next((engine for engine in document["engines"] if engine["name"] == name), None)
