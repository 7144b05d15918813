"""Checks of a configuration that its types cannot express: syntax of values, and keys that must agree with each other.

Nothing here looks at the machine (config_world.py does), so a saved configuration can be read again at any time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from typing import Final

from supervisord import config_gpus, config_notify
from supervisord.config_flags import variable_findings
from supervisord.config_problems import Finding, Parts, looks_secret, nearest, printable, shown
from supervisord.core.spec import ENGINE_NAME_PATTERN, EngineSpec, NodeSpec, RestartSpec, SupervisorSpec

SUN_PATH_BYTES: Final = 107
"""Longest path of a Unix socket (unix(7): 108 bytes with the final NUL)."""
_VLLM_SOCKET_NAME_BYTES: Final = 41
"""vLLM's sockets in TMPDIR have names of 36 to 41 characters."""

_TEMPORARY: Final = "tmp"
_MAX_PORT: Final = 65535

PERSISTENCE_MODES: Final = ("auto", "on", "off", "leave")

_NAME: Final = re.compile(ENGINE_NAME_PATTERN.removesuffix("$"))
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(:[\w.-]+)?", re.ASCII)
_MODEL_URI: Final = re.compile(r"[a-z][a-z0-9+.-]*://\S+", re.ASCII)
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252}[A-Za-z0-9])?\.?", re.ASCII)
_ADDRESS: Final = re.compile(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:\[\]]+)):(?P<port>[0-9]{1,5})", re.ASCII)
_DURATION: Final = re.compile(r"[1-9][0-9]{0,4}[smhd]", re.ASCII)
_ANY_HOST: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104 (compared with, never bound)


def findings(spec: NodeSpec) -> Iterator[Finding]:
    """Everything that is wrong with values that have the right types."""
    yield from _supervisor(spec.supervisor)
    for pattern, mode in spec.gpu.persistence_override.items():
        if mode not in PERSISTENCE_MODES:
            known = ", ".join(f'"{known}"' for known in PERSISTENCE_MODES)
            near = nearest(mode, PERSISTENCE_MODES)
            remedy = f'did you mean "{near}"?' if near else ""
            yield _finding(("gpu", "persistence_override", pattern), mode, f"must be one of {known}", remedy)
    for engine in spec.engines.values():
        at = ("engine", engine.name)
        yield from _program(engine, at)
        yield from _address(engine, at)
        yield from _gpus(engine, at)
        yield from _files(engine, at)
        yield from _names(engine, at)
        yield from _drain(engine, at)
        yield from _restart(engine.restart, (*at, "restart"))
        yield from _temporary_directory(spec.supervisor.state_dir, engine.name)
        for name, value in engine.env.items():
            yield from variable_findings(name, value, has_gpus=bool(engine.gpus), at=(*at, "env", name))
    yield from _ports(spec)
    yield from config_gpus.too_much(spec)
    for receiver in spec.notify.values():
        yield from config_notify.findings(receiver)


def stricter(spec: NodeSpec) -> Iterator[Finding]:
    """What is refused in the files alone: what was applied before there was such a rule must not lose its daemon."""
    for engine in spec.engines.values():
        yield from _start(engine, spec.supervisor, ("engine", engine.name))


def warnings(spec: NodeSpec) -> Iterator[Finding]:
    """What works, but probably not as it is meant."""
    yield from config_gpus.perhaps_too_much(spec)
    for receiver in spec.notify.values():
        yield from config_notify.warnings(receiver)
    for engine in spec.engines.values():
        at = ("engine", engine.name)
        for gpu in filter(config_gpus.GPU_INDEX.fullmatch, engine.gpus):
            message = "an index can mean another GPU after a reboot"
            yield _finding((*at, "gpus"), gpu, message, "write its UUID (nvidia-smi -L)")
        if _socket_bytes(spec.supervisor.state_dir, engine.name, generation_digits=4) > SUN_PATH_BYTES:
            message = "its starts can fail once its generation number has four digits: paths of sockets get too long"
            yield Finding(at, message, "shorten supervisor.state_dir or the name of the engine")


def valid_engine_name(name: str) -> bool:
    """Whether an engine, or a receiver of notifications, may be called this."""
    return _NAME.fullmatch(name) is not None


def host_and_port(address: str) -> tuple[str, int] | None:
    """Parse "HOST:PORT", with an IPv6 address in brackets; None when it is no address."""
    found = _ADDRESS.fullmatch(address)
    if found is None or not 1 <= int(found["port"]) <= _MAX_PORT:
        return None
    if found["v6"] is not None:
        return (found["v6"], int(found["port"])) if _is_ip(found["v6"]) else None
    return (found["host"], int(found["port"])) if _HOST_NAME.fullmatch(found["host"]) else None


# --- [supervisor] -----------------------------------------------------------------------------------------------------


def _supervisor(spec: SupervisorSpec) -> Iterator[Finding]:
    if not spec.state_dir.startswith("/"):
        yield _finding(("supervisor", "state_dir"), spec.state_dir, "must be an absolute path")
    at = ("supervisor", "socket")
    if not spec.socket.startswith("/") or spec.socket.endswith("/"):
        yield _finding(at, spec.socket, "must be the absolute path of a socket")
    elif len(spec.socket.encode()) > SUN_PATH_BYTES:
        yield _finding(at, spec.socket, f"the path of a socket has at most {SUN_PATH_BYTES} bytes", "shorten it")
    if spec.listen and host_and_port(spec.listen) is None:
        remedy = 'write for example "127.0.0.1:9401" or "[::1]:9401", or "" for none'
        yield _finding(("supervisor", "listen"), spec.listen, 'must be "HOST:PORT" with a port from 1 to 65535', remedy)
    if spec.metrics_token_file is not None and not spec.metrics_token_file.startswith("/"):
        # The value is not shown: it may be the token itself.
        at = ("supervisor", "metrics_token_file")
        yield Finding(at, "must be the absolute path of a file that holds the token")


def _socket_bytes(state_dir: str, engine: str, generation_digits: int) -> int:
    """Length of the longest socket path of an engine: `<state_dir>/tmp/<engine>.<generation>/<name by vLLM>`.

    The launcher uses the last four digits of the generation.
    """
    directory = len(f"{state_dir.rstrip('/')}/{_TEMPORARY}/{engine}.".encode())
    return directory + generation_digits + 1 + _VLLM_SOCKET_NAME_BYTES


def _temporary_directory(state_dir: str, engine: str) -> Iterator[Finding]:
    excess = _socket_bytes(state_dir, engine, generation_digits=2) - SUN_PATH_BYTES + 1
    if excess > 0:
        at = ("supervisor", "state_dir")
        message = (
            f"the paths of vLLM's sockets in {_TEMPORARY}/{engine}.1 below it would have more than "
            f"{SUN_PATH_BYTES - 1} bytes, which the system does not take"
        )
        yield _finding(at, state_dir, message, f"shorten it by at least {excess}", related=(("engine", engine),))


# --- one engine -------------------------------------------------------------------------------------------------------


def _program(engine: EngineSpec, at: Parts) -> Iterator[Finding]:
    here = (*at, "command")
    command = engine.command
    if not command or not all(command):
        yield Finding(here, "it names no program", 'write for example ["/opt/vllm/bin/vllm", "serve"]', shown(command))
    elif "/" in command[0] and not command[0].startswith("/"):
        yield _finding(
            here, command[0], "it is relative to a directory that the daemon does not know", "make it absolute"
        )
    for word in command[1:]:
        flag = word.partition("=")[0].replace("_", "-") if word.startswith("--") else ""
        if flag in {"--host", "--port", "--model"}:
            yield Finding(here, f"must not hold {flag}, which the supervisor passes itself", f"use the key {flag[2:]}")
        elif looks_secret(flag):
            message = f"must not hold {printable(flag)}: a command line can be read by every user of the machine"
            yield Finding(here, message, "use api_key_file or [engine.X.env]")
    model = engine.model
    if model.startswith("/") or _HUB_NAME.fullmatch(model) or _MODEL_URI.fullmatch(model):
        return
    if model.startswith((".", "~")) or "/" in model:
        message = "it is relative to a directory that the daemon does not know, and no name of a hub"
        yield _finding((*at, "model"), model, message, "write the absolute path of the directory")
    else:
        message = "it is neither an absolute path nor the name of a model on a hub"
        yield _finding((*at, "model"), model, message, 'write "/path/of/a/model" or "organisation/name"')


def _address(engine: EngineSpec, at: Parts) -> Iterator[Finding]:
    if not _is_ip(engine.host) and not _HOST_NAME.fullmatch(engine.host):
        remedy = 'write for example "127.0.0.1"'
        yield _finding((*at, "host"), engine.host, "must be an IP address or the name of a host", remedy)


def _gpus(engine: EngineSpec, at: Parts) -> Iterator[Finding]:
    here = (*at, "gpus")
    seen = set()
    for gpu in engine.gpus:
        identity = config_gpus.identity(gpu)
        if identity is None:
            message = "it is neither a UUID nor a PCI id nor an index"
            yield _finding(here, gpu, message, "nvidia-smi -L shows the UUIDs")
        elif identity in seen:
            yield _finding(here, gpu, "it names a GPU twice", "remove one of them")
        seen.add(identity)


def _files(engine: EngineSpec, at: Parts) -> Iterator[Finding]:
    for file in engine.warmup.prime:
        if not file.startswith("/"):
            yield _finding((*at, "warmup", "prime"), file, "must be an absolute path")
    if engine.api_key_file is not None and not engine.api_key_file.startswith("/"):
        # The value is not shown: it may be the key itself.
        yield Finding((*at, "api_key_file"), "must be the absolute path of a file that holds the key")


def _names(engine: EngineSpec, at: Parts) -> Iterator[Finding]:
    for key in ("profile", "replica_group"):
        name = getattr(engine, key)
        if name is not None and not valid_engine_name(name):
            message = "must begin with a letter or digit and go on with at most 31 of a-z, 0-9, _ and -"
            yield _finding((*at, key), name, message)


def _drain(engine: EngineSpec, at: Parts) -> Iterator[Finding]:
    if engine.drain_min_s > engine.drain_timeout_s:
        limit = (*at, "drain_timeout_s")
        message = f"must not be more than drain_timeout_s ({engine.drain_timeout_s:g})"
        remedy = "raise drain_timeout_s or lower this"
        yield _finding((*at, "drain_min_s"), engine.drain_min_s, message, remedy, related=(limit,))


def _start(engine: EngineSpec, spec: SupervisorSpec, at: Parts) -> Iterator[Finding]:
    """Progress is measured at each poll: a start must be seen twice before it can be called still."""
    if engine.start_timeout_s < 2 * spec.poll_interval_s:
        polls = ("supervisor", "poll_interval_s")
        message = (
            f"must be twice supervisor.poll_interval_s ({spec.poll_interval_s:g}) or more: progress is seen by polls"
        )
        remedy = "raise it or lower poll_interval_s"
        yield _finding((*at, "start_timeout_s"), engine.start_timeout_s, message, remedy, related=(polls,))


def _restart(spec: RestartSpec, at: Parts) -> Iterator[Finding]:
    if spec.backoff_initial_s > spec.backoff_max_s:
        here, limit = (*at, "backoff_initial_s"), (*at, "backoff_max_s")
        message = f"must not be more than backoff_max_s ({spec.backoff_max_s:g})"
        yield _finding(here, spec.backoff_initial_s, message, "raise backoff_max_s or lower this", related=(limit,))
    if spec.maintenance_window and (wrong := _window(spec.maintenance_window)) is not None:
        remedy = 'write five cron fields and a duration, for example "0 3 * * sun 2h"'
        yield _finding((*at, "maintenance_window"), spec.maintenance_window, wrong, remedy)


def _window(text: str) -> str | None:
    """What is wrong with a maintenance window "CRON DURATION"."""
    *cron, duration = text.split() or [""]
    if len(cron) != 5:  # noqa: PLR2004 (minute, hour, day of month, month, day of week)
        return f"it must have five cron fields and a duration, and has {len(cron) + 1} fields in all"
    if not _DURATION.fullmatch(duration):
        return f'"{duration}" is no duration such as 90m or 2h'
    if re.search(r"[0-9]", cron[4]):
        return "the day of the week must be a name (mon to sun): its numbers differ between crons"
    return _cron(" ".join(cron))


def _cron(expression: str) -> str | None:
    from datetime import timezone  # noqa: PLC0415 (only configurations with a window pay for the scheduler's import)

    from apscheduler.triggers.cron import CronTrigger  # noqa: PLC0415 (the same)

    try:
        CronTrigger.from_crontab(expression, timezone=timezone.utc)
    except (ValueError, TypeError) as error:
        return f"it is no cron expression ({error})"
    return None


# --- engines together -------------------------------------------------------------------------------------------------


def _ports(spec: NodeSpec) -> Iterator[Finding]:
    users: list[tuple[Parts, str, int]] = [
        (("engine", engine.name, "port"), engine.host, engine.port) for engine in spec.engines.values()
    ]
    if (own := host_and_port(spec.supervisor.listen)) is not None:
        users.insert(0, (("supervisor", "listen"), *own))
    for (first, host, port), (second, other_host, other_port) in combinations(users, 2):
        if port == other_port and _overlap(host, other_host):
            message = f"{'.'.join(first)} has this port already"
            yield _finding(second, port, message, "give each a port of its own", related=(first,))


def _overlap(host: str, other: str) -> bool:
    """Whether two listeners on one port would be in each other's way."""
    alike = {"127.0.0.1" if name.lower() == "localhost" else name.lower() for name in (host, other)}
    return len(alike) == 1 or bool(alike & _ANY_HOST)


def _is_ip(text: str) -> bool:
    import ipaddress  # noqa: PLC0415 (2 ms that `status` need not pay)

    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _finding(at: Parts, value: object, message: str, remedy: str = "", related: tuple[Parts, ...] = ()) -> Finding:
    return Finding(at, message, remedy, shown(value, at), related)
