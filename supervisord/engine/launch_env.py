"""The environment of an engine: what it inherits, what the supervisor sets, what the operator adds (last, and wins)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from supervisord.config_problems import Parts, looks_secret
from supervisord.config_users import Account
from supervisord.core.spec import EngineSpec
from supervisord.engine.version import supports

DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CUDA_BIN: Final = "/usr/local/cuda/bin"

_KEEP_ALIVE: Final = "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH"
_NEVER: Final = frozenset(
    {
        "NOTIFY_SOCKET",
        "INVOCATION_ID",
        "JOURNAL_STREAM",
        "MANAGERPID",
        "SYSTEMD_EXEC_PID",
        "PYTHONPATH",
        "PYTHONHOME",
        "VIRTUAL_ENV",
        "VLLM_API_KEY",
        _KEEP_ALIVE,
        # Each engine gets a temporary directory of its own from the launcher.
        "TMPDIR",
        "TMP",
        "TEMP",
        "PWD",
        "OLDPWD",
        "_",
    }
)
_NEVER_PREFIXES: Final = ("WATCHDOG_", "LISTEN_", "VLLM_SUPERVISOR_", "SUPERVISED_")
_PERSONAL: Final = frozenset({"HOME", "USER", "LOGNAME", "SHELL", "MAIL", "DBUS_SESSION_BUS_ADDRESS"})
_PERSONAL_PREFIXES: Final = ("XDG_", "SUDO_", "SSH_")
_VLLM_SECRETS: Final = ("HF_", "HUGGING_FACE_", "VLLM_")
"""Secrets that vLLM itself reads: these the daemon passes on when its own environment has them."""


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable and where it comes from: a key of the configuration (`key`), or a reason of the supervisor's."""

    name: str
    value: str
    why: str = ""
    key: Parts | None = None


def inherited(base: Mapping[str, str], *, other_user: bool) -> dict[str, str]:
    """What an engine gets of the daemon's own environment. `other_user`: nothing personal then."""
    return {name: value for name, value in base.items() if _passes(name, other_user=other_user)}


def dropped_on_purpose(base: Mapping[str, str]) -> tuple[str, ...]:
    """Settings of the daemon's environment that an operator may have meant for engines, and that they do not get."""
    return tuple(name for name in (_KEEP_ALIVE, "VLLM_API_KEY") if name in base)


def search_path(spec: EngineSpec, base: Mapping[str, str]) -> str:
    """The PATH in which the engine's program is looked up."""
    return spec.env.get("PATH") or base.get("PATH") or DEFAULT_PATH


def contributed(
    spec: EngineSpec, base: Mapping[str, str], *, who: Account, program: str | None, version: str | None
) -> Iterator[Variable]:
    """What the supervisor and the operator set; of two variables with one name the later holds."""
    why = "the program's own tools first, CUDA's last"
    key = ("env", "PATH") if "PATH" in spec.env else None
    yield Variable("PATH", program_path(search_path(spec, base), program), why, key)
    other_user = who.uid != os.geteuid()
    # A system service has no HOME, and caches of models and compilers are placed below it.
    for name, value in (("HOME", who.home), ("USER", who.name), ("LOGNAME", who.name), ("SHELL", who.shell)):
        if other_user or name not in base:
            yield Variable(name, value, f"the account of {who.name}")
    # Usage reports go out by a thread that calls a public host: on a closed network it only adds errors to the log.
    if not {"VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"} & {*spec.env, *base}:
        yield Variable("VLLM_NO_USAGE_STATS", "1", "no usage reports from servers unless asked for")
    if supports(version, "ready_timeout_env"):
        why = "vLLM's own start limit, not shorter than start_timeout_max_s"
        yield Variable("VLLM_ENGINE_READY_TIMEOUT_S", str(int(spec.start_timeout_max_s)), why)
    yield from _devices(spec)
    for name, value in spec.env.items():
        if name != "PATH":
            yield Variable(name, value, key=("env", name))


def _devices(spec: EngineSpec) -> Iterator[Variable]:
    """CUDA's view. The names stand for their indices, which the core finds at each launch."""
    if spec.gpus:
        # NVML counts in this order, CUDA by default in another.
        yield Variable("CUDA_DEVICE_ORDER", "PCI_BUS_ID", "indices mean the same as in nvidia-smi")
        yield Variable("CUDA_VISIBLE_DEVICES", ",".join(spec.gpus), "from gpus; each launch puts their indices there")
    else:
        yield Variable("CUDA_VISIBLE_DEVICES", "", "an engine without gpus must not touch any")


def program_path(base: str, program: str | None) -> str:
    """`base` with the directory of the program in front (its compilers and ninja) and CUDA's at the end."""
    first = [os.path.dirname(os.path.realpath(program))] if program is not None else []  # noqa: PTH120 (text)
    last = [CUDA_BIN] if os.path.isdir(CUDA_BIN) else []  # noqa: PTH112 (text)
    return ":".join(dict.fromkeys([*first, *filter(None, base.split(":")), *last]))


def _passes(name: str, *, other_user: bool) -> bool:
    if name in _NEVER or name.startswith(_NEVER_PREFIXES):
        return False
    if other_user and (name in _PERSONAL or name.startswith(_PERSONAL_PREFIXES)):
        return False
    return not looks_secret(name) or name.startswith(_VLLM_SECRETS)
