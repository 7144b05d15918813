"""Faults of the daemon and of what is around it: no engine may notice any of them."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable
from functools import partial
from random import Random

from tests.storm.engine_faults import LONG, SHORT
from tests.storm.faults import NotNowError, On, Undo, fault, send
from tests.storm.stage import Stage

DAY_S = 86_400


def _daemon(stage: Stage) -> int:
    if not stage.up:
        raise NotNowError("the daemon is not there")
    return stage.daemon.pid


def _startable(stage: Stage) -> None:
    """With a configuration that is none a daemon goes on with what was applied last."""
    _daemon(stage)
    if not stage.config_is_good and not stage.has_applied():
        raise NotNowError("an older configuration would be applied")


# --- the daemon itself ------------------------------------------------------------------------------------------------


@fault(On.NODE)
def daemon_sigkill(stage: Stage, _: str, __: Random) -> Undo | None:
    """Killed and started again at once."""
    _startable(stage)
    stage.kill()
    stage.start()
    return None


@fault(On.NODE)
def daemon_sigkill_while_starting(stage: Stage, _: str, rng: Random) -> Undo | None:
    """Killed again and again before it is there."""
    _startable(stage)
    stage.kill()
    for _try in range(2):
        stage.daemon.start(wait=False)
        threading.Event().wait(rng.random() * 0.5)
        stage.kill()
    stage.start()
    return None


@fault(On.NODE, (0.5, 4.0))
def daemon_sigstop(stage: Stage, _: str, __: Random) -> Undo | None:
    """Frozen: what happens meanwhile comes all at once."""
    pid = _daemon(stage)
    stage.down()
    send(pid, signal.SIGSTOP)

    def go_on() -> None:
        send(pid, signal.SIGCONT)
        stage.back()

    return go_on


@fault(On.ALL)
def daemon_sigterm(stage: Stage, _: str, __: Random) -> Undo | None:
    """Ended as one does it, engines with it (plain launcher), and started again."""
    _daemon(stage)
    if not stage.config_is_good:
        raise NotNowError("nothing would live that it could be applied to")
    stage.down()
    code = stage.daemon.stop()
    assert code == 0, f"the daemon ended with {code}"
    left = stage.daemon.leftovers()
    assert not [pid for pid in left if pid != stage.stranger], f"left behind by SIGTERM: {left}"
    stage.start()
    return None


# --- its surroundings -------------------------------------------------------------------------------------------------


@fault(On.NODE, LONG)
def disk_full(stage: Stage, _: str, __: Random) -> Undo | None:
    """Not a byte is left where the state is."""
    ballast = stage.daemon.state_dir / "ballast"
    if ballast.exists():
        raise NotNowError("it is full already")
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass
    return partial(ballast.unlink, missing_ok=True)


@fault(On.NODE, LONG)
def clock_jumps(stage: Stage, _: str, rng: Random) -> Undo | None:
    """The daemon's wall clock jumps, and back."""
    days = rng.choice((-400, -1, 1, 20, 400))
    stage.clock.jump(days * DAY_S if rng.random() < 0.5 else rng.randrange(-7200, 7200))
    return partial(stage.clock.jump, 0)


@fault(On.NODE)
def reload_same(stage: Stage, _: str, rng: Random) -> Undo | None:
    """What changes concerns no running process."""
    _daemon(stage)
    if not stage.config_is_good:
        raise NotNowError("the configuration is bad")
    for sim in stage.sims.values():
        sim.change(slo={"ttft_p95_ms": rng.randrange(100, 10_000)})
    stage.daemon.configure(stage.engines_toml())
    stage.reload()
    return None


@fault(On.NODE, SHORT)
def reload_bad(stage: Stage, _: str, rng: Random) -> Undo | None:
    """A configuration that is none: nothing changes."""
    _daemon(stage)
    if not stage.config_is_good:
        raise NotNowError("it is bad already")
    stage.config_is_good = False
    good = stage.engines_toml()
    bad = (f"{good}\n[engine.calm\n", good.replace("port = ", 'port = "x"\nprot = '), "\x00\xff", good * 2)
    stage.daemon.write_config(rng.choice(bad))
    stage.reload()

    def mend() -> None:
        stage.daemon.configure(stage.engines_toml())
        stage.config_is_good = True
        stage.reload()

    return mend


def _receiver(mood: str, stage: Stage) -> Undo:
    stage.receiver.mood = mood

    def undo() -> None:
        stage.receiver.mood = "ok"

    return undo


@fault(On.NODE, LONG)
def webhook_hangs(stage: Stage, _: str, __: Random) -> Undo | None:
    """The receiver takes notices and never answers."""
    return _receiver("hang", stage)


@fault(On.NODE, LONG)
def webhook_refuses(stage: Stage, _: str, __: Random) -> Undo | None:
    """The receiver answers 503."""
    return _receiver("refuse", stage)


# --- clients ----------------------------------------------------------------------------------------------------------

Connect = Callable[[], socket.socket]


def _control(stage: Stage) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(1)
    try:
        sock.connect(str(stage.daemon.socket))
    except OSError:
        sock.close()
        raise
    return sock


def _listener(stage: Stage) -> socket.socket:
    return socket.create_connection(("127.0.0.1", stage.listen_port), 1)


def _flood(connect: Connect, requests: tuple[bytes, ...], seed: int) -> Undo:
    """Some clients ask as fast as they are answered, and sometimes leave before."""
    over = threading.Event()

    def run(rng: Random) -> None:
        while not over.wait(0.005):
            with contextlib.suppress(OSError), connect() as sock:
                sock.sendall(rng.choice(requests))
                while rng.random() < 0.9 and sock.recv(65536):
                    pass

    for number in range(6):
        threading.Thread(target=run, args=(Random(seed + number),), daemon=True).start()
    return over.set


def _slow(connect: Connect, first: bytes) -> Undo:
    """Many clients that stay, and say a byte now and then."""
    over = threading.Event()

    def run() -> None:
        with contextlib.ExitStack() as stack:
            socks = []
            for _ in range(80):
                with contextlib.suppress(OSError):
                    socks.append(stack.enter_context(connect()))
                    socks[-1].sendall(first)
            while not over.wait(0.2):
                for sock in socks:
                    with contextlib.suppress(OSError):
                        sock.sendall(b"x")

    threading.Thread(target=run, daemon=True).start()
    return over.set


_ASKED = (
    b"GET /v1/status HTTP/1.0\r\n\r\n",
    b"GET /v1/events?limit=1000 HTTP/1.0\r\n\r\n",
    b"GET /v1/engines/a/why HTTP/1.0\r\n\r\n",
    b"GET /v1/engines/a/log HTTP/1.0\r\n\r\n",
    b"GET /v1/engines/%00/log?offset=-1 HTTP/1.0\r\n\r\n",
    b"POST /v1/engines/nobody/stop HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/gpus/clear HTTP/1.0\r\nContent-Length: 99999999999\r\n\r\n",
    b"\x16\x03\x01\x00\xff\r\n\r\n",
    b"A" * 70_000,
)
_SCRAPED = (
    b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"GET /ready HTTP/1.0\r\n\r\n",
    b"GET /ready/a HTTP/1.0\r\n\r\n",
    b"GET /../../etc/passwd HTTP/1.0\r\n\r\n",
    b"POST /ready HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.0\r\n\r\n",
    bytes(range(256)) * 2,
)


@fault(On.NODE, SHORT)
def control_flood(stage: Stage, _: str, rng: Random) -> Undo | None:
    """Good and bad requests on the control socket."""
    return _flood(partial(_control, stage), _ASKED, rng.randrange(10**9))


@fault(On.NODE, SHORT)
def control_slow_clients(stage: Stage, _: str, __: Random) -> Undo | None:
    """Requests on the control socket that never end."""
    return _slow(partial(_control, stage), b"GET /v1/status HTTP/1.0\r\nX: ")


@fault(On.NODE, SHORT)
def listener_flood(stage: Stage, _: str, rng: Random) -> Undo | None:
    """Scrapes, probes and rubbish on the listener."""
    return _flood(partial(_listener, stage), _SCRAPED, rng.randrange(10**9))


@fault(On.NODE, SHORT)
def listener_slow_clients(stage: Stage, _: str, __: Random) -> Undo | None:
    """Scrapes that never end."""
    return _slow(partial(_listener, stage), b"GET /metrics HTTP/1.1\r\nX: ")
