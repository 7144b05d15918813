"""What the GPU probe says, checked like input from a stranger: it shares a process with a driver that may be broken."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeGuard

from supervisord.core.gpu_samples import MEMORY_V1, MEMORY_V2, GpuPlace, GpuProcess, GpuReading, GpuSweep
from supervisord.core.messages import GpusSwept, PersistenceSet, XidSeen
from supervisord.log import printable

LINE_BYTES: Final = 1 << 20
"""A longer line is no answer: sixteen GPUs with two hundred processes each take a quarter of it."""


@dataclass(frozen=True, slots=True)
class Depths:
    """What `doctor` alone wants to know of one GPU; None is unknown or unsupported.

    `fabric_state`: NVML_GPU_FABRIC_STATE_*: 0 not supported, 1 not started, 2 in progress, 3 completed;
    `fabric_status`: the NVML code that it completed with.
    """

    nvlinks_up: int | None = None
    nvlinks: int | None = None
    fabric_state: int | None = None
    fabric_status: int | None = None
    retired_pending: bool | None = None


@dataclass(frozen=True, slots=True)
class Survey:
    """A slow sweep, the newest CUDA that the driver can serve, and the depths of `sweep.gpus`, in their order."""

    sweep: GpuSweep
    cuda: tuple[int, int] | None = None
    depths: tuple[Depths, ...] = ()


Whose = Callable[[int], "tuple[str, int] | None"]
"""Engine and generation of a process, by pid."""

_TEXT_CHARS: Final = 96
_INTEGER_MAX: Final = (1 << 64) - 1
_NUMBER_MAX: Final = 1e15
_CODE_MAX: Final = (1 << 31) - 1
_PCI_ID: Final = re.compile(r"([0-9a-fA-F]{1,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.([0-7]))?")


class ProtocolError(ValueError):
    """A line that cannot be an answer; the message says what is wrong with it."""


def sweep_request(number: int, *, slow: bool, avoid: Iterable[GpuPlace] = ()) -> bytes:
    """Look at all GPUs but those to avoid."""
    return _line({"sweep": number, "slow": slow, "avoid": [[gpu.uuid, gpu.pci_id, gpu.index] for gpu in avoid]})


def survey_request(avoid: Iterable[GpuPlace] = ()) -> bytes:
    """Look at everything once, for `decode_survey`."""
    return _line(
        {"sweep": 1, "slow": True, "deep": True, "avoid": [[gpu.uuid, gpu.pci_id, gpu.index] for gpu in avoid]}
    )


def persistence_request(uuid: str, *, on: bool) -> bytes:
    """Switch persistence mode."""
    return _line({"persistence": uuid, "on": on})


def _line(request: Mapping[str, Any]) -> bytes:
    return json.dumps(request).encode() + b"\n"


def decode(line: bytes, helper: int, now: float, whose: Whose) -> GpusSwept | PersistenceSet | XidSeen:
    """One line of the probe with this number. Raises ProtocolError and nothing else.

    `now`: monotonic seconds; nothing is later. Keys that are not known are passed over.
    """
    try:
        said = json.loads(line, parse_constant=_refuse_constant)
    except ProtocolError:
        raise
    except (ValueError, RecursionError):
        raise ProtocolError("it is not JSON") from None
    if not isinstance(said, dict):
        raise ProtocolError("it is not a JSON object")
    if "sweep" in said:
        return GpusSwept(helper, _integer(said, "sweep"), _sweep(said, now, whose))
    if "persistence" in said:
        return PersistenceSet(_text(said, "persistence"), _flag(said, "on"), _code(said, "error"))
    if "xid" in said:
        return XidSeen(_at(said, now), _text(said, "gpu"), _integer(said, "xid", most=_CODE_MAX), "nvml")
    raise ProtocolError("it has none of the keys sweep, persistence and xid")


def decode_survey(line: bytes, now: float) -> Survey:
    """The one answer to a `survey_request`. Raises ProtocolError and nothing else."""
    swept = decode(line, 1, now, lambda _pid: None)
    if not isinstance(swept, GpusSwept):
        raise ProtocolError("it is no sweep")
    said = json.loads(line)
    cuda = None if said.get("cuda") is None else _integer(said, "cuda", most=_CODE_MAX)
    return Survey(
        swept.sweep,
        None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
        tuple(_depths(gpu) for gpu in _list(said, "gpus")),
    )


def _depths(gpu: Mapping[str, Any]) -> Depths:
    kinds: Mapping[str, Callable[[Mapping[str, Any], str], Any]] = {
        "nvlinks_up": _integer,
        "nvlinks": _integer,
        "fabric_state": _integer,
        "fabric_status": _integer,
        "retired_pending": _flag,
    }
    return Depths(**{field: check(gpu, field) for field, check in kinds.items() if field in gpu})


def pci_id(text: str) -> str:
    """In the form 0000:1b:00.0. Raises ProtocolError."""
    match = _PCI_ID.fullmatch(text)
    if match is None:
        raise ProtocolError(f"{printable(text[:_TEXT_CHARS])!r} is no PCI id")
    domain, bus, device, function = match.groups()
    return f"{int(domain, 16):04x}:{bus}:{device}.{function or 0}".lower()


def _sweep(said: Mapping[str, Any], now: float, whose: Whose) -> GpuSweep:
    owners: dict[int, tuple[str, int] | None] = {}

    def owner(pid: int) -> tuple[str, int] | None:
        if pid not in owners:
            owners[pid] = whose(pid)
        return owners[pid]

    problem = _code(said, "problem")
    gpus = tuple(_reading(gpu, owner) for gpu in _list(said, "gpus"))
    uuids = [gpu.uuid for gpu in gpus if gpu.uuid]
    if len(set(uuids)) < len(uuids):
        raise ProtocolError("two GPUs have one UUID")
    if problem is not None and gpus:
        raise ProtocolError("it has both a problem and GPUs")
    return GpuSweep(
        at=_at(said, now),
        gpus=gpus,
        problem=problem,
        slow=_flag(said, "slow"),
        driver=_text(said, "driver"),
        took_ms=_number(said, "took_ms"),
        xids_watched=_texts(said, "xids"),
    )


def _reading(gpu: object, owner: Whose) -> GpuReading:
    if not isinstance(gpu, dict):
        raise ProtocolError("a GPU is not a JSON object")
    uuid, error = _text(gpu, "uuid"), _code(gpu, "error")
    if not uuid and error is None:
        raise ProtocolError("a GPU that answers has no UUID")
    return GpuReading(
        uuid=uuid,
        pci_id=pci_id(_text(gpu, "pci_id")) if uuid else "",
        index=_integer(gpu, "index"),
        name=_text(gpu, "name") if "name" in gpu else "",
        compute=_compute(gpu),
        error=error,
        problems=_problems(gpu),
        unsupported=_texts(gpu, "unsupported") if "unsupported" in gpu else frozenset(),
        memory_version=_memory_version(gpu),
        processes=_processes(gpu, owner) if "processes" in gpu else None,
        **{field: check(gpu, field) for field, check in _VALUES.items() if field in gpu},
    )


def _compute(gpu: Mapping[str, Any]) -> tuple[int, int] | None:
    match gpu.get("compute"):
        case None:
            return None
        case [major, minor] if _whole(major, _CODE_MAX) and _whole(minor, _CODE_MAX):
            return major, minor
        case _:
            raise _refused("compute")


def _memory_version(gpu: Mapping[str, Any]) -> int | None:
    version = gpu.get("memory_version")
    if version is None or _whole(version, MEMORY_V2, least=MEMORY_V1):
        return version
    raise _refused("memory_version")


def _problems(gpu: Mapping[str, Any]) -> dict[str, int]:
    problems = gpu.get("problems", {})
    if not isinstance(problems, dict):
        raise _refused("problems")
    return {_clean(field): _integer(problems, field, most=_CODE_MAX) for field in problems}


def _processes(gpu: Mapping[str, Any], owner: Whose) -> tuple[GpuProcess, ...]:
    processes = []
    for process in _list(gpu, "processes"):
        match process:
            case [pid, used_bytes, str(name)] if _whole(pid, _CODE_MAX, least=1) and (
                used_bytes is None or _whole(used_bytes, _INTEGER_MAX)
            ):
                engine, generation = owner(pid) or (None, None)
                processes.append(GpuProcess(pid, used_bytes, _clean(name), engine, generation))
            case _:
                raise _refused("processes")
    return tuple(processes)


def _whole(value: object, most: int, least: int = 0) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _integer(said: Mapping[str, Any], key: str, most: int = _INTEGER_MAX) -> int:
    value = said.get(key)
    if _whole(value, most):
        return value
    raise _refused(key)


def _code(said: Mapping[str, Any], key: str) -> int | None:
    """An NVML code or null; the key must be there, if only to say that nothing failed."""
    return None if key in said and said[key] is None else _integer(said, key, most=_CODE_MAX)


def _number(said: Mapping[str, Any], key: str) -> float:
    value = said.get(key)
    # The comparison fails for NaN and the infinities as well.
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= _NUMBER_MAX:
        raise _refused(key)
    return float(value)


def _at(said: Mapping[str, Any], now: float) -> float:
    return min(_number(said, "at"), now)


def _flag(said: Mapping[str, Any], key: str) -> bool:
    value = said.get(key)
    if not isinstance(value, bool):
        raise _refused(key)
    return value


def _text(said: Mapping[str, Any], key: str) -> str:
    value = said.get(key)
    if not isinstance(value, str):
        raise _refused(key)
    return _clean(value)


def _texts(said: Mapping[str, Any], key: str) -> frozenset[str]:
    values = _list(said, key)
    if not all(isinstance(value, str) for value in values):
        raise _refused(key)
    return frozenset(_clean(value) for value in values)


def _list(said: Mapping[str, Any], key: str) -> list[Any]:
    value = said.get(key)
    if not isinstance(value, list):
        raise _refused(key)
    return value


def _clean(text: str) -> str:
    cut = text[:_TEXT_CHARS]
    return (cut if cut.isprintable() else printable(cut)).strip()


def _refused(key: str) -> ProtocolError:
    return ProtocolError(f"the value of {_clean(key)} is missing or not of its kind")


def _refuse_constant(name: str) -> NoReturn:
    raise ProtocolError(f"{name} is no number")


_VALUES: Final[Mapping[str, Callable[[Mapping[str, Any], str], Any]]] = {
    "architecture": _integer,
    "brand": _integer,
    "total_bytes": _integer,
    "used_bytes": _integer,
    "free_bytes": _integer,
    "persistence": _flag,
    "utilization_percent": _number,
    "temperature_c": _number,
    "power_w": _number,
    "clock_reasons": _integer,
    "energy_j": _number,
    "mig": _flag,
    "ecc_uncorrected": _integer,
    "remap_pending": _flag,
    "remap_failed": _flag,
    "recovery_action": _integer,
}
"""Fields of `GpuReading` that are there when they are known."""
