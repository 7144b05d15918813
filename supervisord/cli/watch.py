"""`status --watch`: a steady picture on the terminal's other screen, until q or Ctrl-C.

One thread waits for the status, one for events, one for keys; all they do is to put what came into a queue. Everything
that was changed on the terminal is put back at every end, and while it is stopped with Ctrl-Z.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import termios
import threading
import time
from functools import partial

from supervisord.cli import OK, frame, render
from supervisord.control.client import ANSWER_S, ControlError, engine_name, get

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, Final, NoReturn

    Document = dict[str, Any]
    Select = Callable[[Document], Document]

REFRESH_S: Final = 2.0
PAUSE_S: Final = 0.2
"""A busy node changes many times a second, a reader's eyes do not."""
LATE_S: Final = 3.0
"""A daemon that is so late with what it would have said at once is in trouble, and the picture old."""
_TICK_S: Final = 1.0
_RETRY_S: Final = 1.0
_EVENTS_WAIT_S: Final = 25.0
_EVENTS_RETRY_S: Final = 10.0
_ENTER: Final = "\x1b[?1049h\x1b[?25l"
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"
_HOME: Final = "\x1b[H"
_CLEAR_LINE: Final = "\x1b[K"
_CLEAR_BELOW: Final = "\x1b[J"
_ENDS: Final = (signal.SIGTERM, signal.SIGHUP)


class Screen:
    """The terminal while we draw on it: another screen, no cursor, no echo. Use as a context manager."""

    def __init__(self, redraw: Callable[[], None]) -> None:
        self._redraw = redraw
        self._modes: list[Any] | None = None
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Screen:  # noqa: PYI034 (typing.Self came with Python 3.11)
        for number in _ENDS:
            self._handlers[number] = signal.signal(number, _end)
        self._handlers[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda *_: self._redraw())
        self._handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._stop)
        self._take()
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def draw(self, lines: list[str]) -> None:
        """Draw over what was there, in one piece; the last line has no line feed, which would scroll."""
        text = f"{_CLEAR_LINE}\n".join(lines)
        print(f"{_HOME}{text}{_CLEAR_LINE}{_CLEAR_BELOW}", end="", flush=True)

    def _take(self) -> None:
        with contextlib.suppress(termios.error, ValueError, OSError):  # stdin is no terminal: there is nothing to echo
            modes = termios.tcgetattr(sys.stdin.fileno())
            quiet = [*modes]
            quiet[3] &= ~(termios.ECHO | termios.ICANON)
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, quiet)
            self._modes = modes
        print(_ENTER, end="", flush=True)

    def _give_back(self) -> None:
        with contextlib.suppress(OSError):  # the terminal itself may be gone
            print(_LEAVE, end="", flush=True)
        if self._modes is not None:
            with contextlib.suppress(termios.error, OSError):
                termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._modes)

    def _stop(self, number: int, _: FrameType | None) -> None:
        """Ctrl-Z: the shell gets its terminal as it was; with `fg` we go on."""
        self._give_back()
        handler = signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, handler)
        self._take()
        self._redraw()


def _raise(error: Exception) -> NoReturn:
    raise error


def _end(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


class Watch:
    """What is known so far, and what comes in."""

    def __init__(self, socket: str, engine: str | None, select: Select) -> None:
        self._socket = socket
        self._engine = engine
        self._select = select
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._history = frame.History()
        self._document: Document = {}
        self._events: list[Document] = []
        self._trouble: str | None = None
        self._seen_at = 0.0
        self._ended = False

    def run(self) -> int:
        """Show until q; Ctrl-C and signals end it by an exception. Raises ControlError if there is nothing to show."""
        serial = self._look("/v1/status", ANSWER_S)
        self._wait()
        for feed in (partial(self._follow_status, serial), self._follow_events, self._read_keys):
            threading.Thread(target=self._run, args=(feed,), daemon=True).start()
        with Screen(lambda: self._inbox.put(lambda: None)) as screen:
            while not self._ended:
                screen.draw(self._picture())
                self._wait()
        return OK

    def _wait(self) -> None:
        """Take in what came, or a second of time."""
        with contextlib.suppress(queue.Empty):
            self._inbox.get(timeout=_TICK_S)()
            while True:
                self._inbox.get_nowait()()

    def _picture(self) -> list[str]:
        width, colour = render.terminal()
        now, wall = time.monotonic(), time.time()
        trouble = None
        if self._trouble is not None:
            ago = render.duration(now - self._seen_at)
            trouble = f"{self._trouble}; what follows was seen {ago} ago"
        marks = frame.BLOCKS if (sys.stdout.encoding or "").lower().startswith("utf") else frame.ASCII
        return frame.frame(
            self._document,
            self._history,
            self._events,
            trouble,
            size=(width, render.rows() or 24),
            colour=colour,
            marks=marks,
            times=(now, wall),
        )

    # --- threads ------------------------------------------------------------------------------------------------------

    def _run(self, feed: Callable[[], None]) -> None:
        """A bug ends the command with its sentence, instead of a thread with its traceback on the picture."""
        try:
            feed()
        except Exception as error:  # noqa: BLE001 - it is raised again where it can be told
            self._inbox.put(partial(_raise, error))

    def _look(self, target: str, within_s: float) -> int:
        reply = get(self._socket, target, within_s)
        document, serial = self._select(reply.document()), reply.number("status-serial")
        self._inbox.put(partial(self._show, document))
        return serial

    def _follow_status(self, serial: int) -> None:
        while True:
            time.sleep(PAUSE_S)
            try:
                serial = self._look(f"/v1/status?after={serial}&timeout={REFRESH_S}", REFRESH_S + LATE_S)
            except ControlError as error:
                self._inbox.put(partial(self._lost, str(error)))
                time.sleep(_RETRY_S)

    def _follow_events(self) -> None:
        shared = "" if self._engine is None else f"&engine={engine_name(self._engine)}"
        query, wait_s = f"limit={frame.EVENTS_MAX}", 0.0
        while True:
            try:
                page = get(self._socket, f"/v1/events?{query}{shared}", ANSWER_S + wait_s).document()
            except ControlError:  # the other feed tells of a daemon that is away; without a history there is none
                time.sleep(_EVENTS_RETRY_S)
                continue
            self._inbox.put(partial(self._add, page["events"]))
            wait_s = _EVENTS_WAIT_S
            query = f"after={page['last_id']}&limit={frame.EVENTS_MAX}&timeout={wait_s:g}"

    def _read_keys(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while key := os.read(sys.stdin.fileno(), 1):
                if key in b"qQ":
                    self._inbox.put(self._quit)

    # --- what they brought, on the main thread ------------------------------------------------------------------------

    def _show(self, document: Document) -> None:
        self._document, self._trouble, self._seen_at = document, None, time.monotonic()
        self._history.add(document, self._seen_at)

    def _lost(self, why: str) -> None:
        self._trouble = why

    def _add(self, events: list[Document]) -> None:
        self._events = [*self._events, *events][-frame.EVENTS_MAX :]

    def _quit(self) -> None:
        self._ended = True
