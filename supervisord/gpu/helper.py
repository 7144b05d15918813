"""The GPU probe: the only process that calls NVML, because such a call can hang in the kernel for ever.

It is run as a script, by path and without site-packages (`python -IS helper.py DIRECTORY_OF_PYNVML`), and imports
nothing else of ours: it holds 15 MiB, and starts from an installed package and from a source tree alike.

One JSON object a line; `protocol.py` reads the answers:

    {"sweep": 7, "slow": false, "avoid": [[UUID, PCI id, index]]}
                                          answered by the same, with what was seen; what is to be avoided is not touched
                                          with "deep": true also what only `doctor` wants to know (gpu/survey.py)
    {"persistence": UUID, "on": true}     answered by the same, with "error": an NVML code or null
                                          unasked: {"xid": 79, "gpu": UUID, "at": monotonic seconds}

The end of stdin ends it at once, also while the driver hangs: that is read in a thread of its own. The kernel's
parent-death signal would not do: it is tied to the thread that started the process, not to the daemon.

Every value is known, unsupported or failed. What a GPU or driver does not have is asked for once and then never again
until NVML is initialised anew.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

if __name__ == "__main__":
    sys.path.extend(sys.argv[1:])

import pynvml

_MEMORY_V1: Final = 1
_MEMORY_V2: Final = 2
_WAIT_MS: Final = 500
"""How long the driver is asked to wait for an Xid at a time: the longest that initialising anew waits for it."""
_STOP_S: Final = 5.0
_AGAIN_S: Final = 2.0
_AGAIN_MAX_S: Final = 30.0
"""Initialising anew while no GPU answers, which takes 0.2 s or more: after so long, then twice that, and so on."""
_PAUSE_S: Final = 1.0
_MILLI: Final = 1000.0
_NAME_BYTES: Final = 64
_RECOVERY_ACTION: Final = 230
"""NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, a field since driver 565 that older nvidia-ml-py do not name."""

_ABSENT: Final = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        pynvml.NVML_ERROR_DEPRECATED,
    }
)

_LOST: Final = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED)
"""The codes that blame the GPU itself, the graver first."""

Way = Callable[[Any], "tuple[Any, ...]"]
"""Takes a handle, gives one value for each field of its query."""
Query = tuple[tuple[str, ...], tuple[Way, ...]]
"""Fields of `GpuReading`, and the ways to get them: the first one that this GPU and driver have is used."""

Avoid = dict[str, "tuple[str, int | None]"]
"""PCI id and index of GPUs that no call may touch, by UUID: their firmware is dead, and each would take 45 s."""

_encode: Final = json.JSONEncoder(separators=(",", ":")).encode


def _attempt(call: Callable[..., Any], *arguments: Any) -> tuple[Any, int | None]:
    """The value, or the NVML code. The text of an NVMLError is never asked for: that is one more call to the driver."""
    try:
        return call(*arguments), None
    except pynvml.NVMLError as error:
        return None, int(error.value)
    except UnicodeDecodeError:
        return None, int(pynvml.NVML_ERROR_UNKNOWN)


def _one(name: str, *arguments: Any, then: Callable[[Any], Any] | None = None) -> Way:
    """A way that is one call with one value."""
    call = getattr(pynvml, name)
    if then is None:
        return lambda handle: (call(handle, *arguments),)
    return lambda handle: (then(call(handle, *arguments)),)


def _from_milli(value: int) -> float:
    return value / _MILLI


def _memory_v2(handle: Any) -> tuple[Any, ...]:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2)
    return memory.total, memory.used, memory.free, _MEMORY_V2


def _memory_v1(handle: Any) -> tuple[Any, ...]:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return memory.total, memory.used, memory.free, _MEMORY_V1


def _remapped_rows(handle: Any) -> tuple[Any, ...]:
    _corrected, _uncorrected, pending, failed = pynvml.nvmlDeviceGetRemappedRows(handle)
    return bool(pending), bool(failed)


def _recovery_action(handle: Any) -> tuple[Any, ...]:
    answer = pynvml.nvmlDeviceGetFieldValues(handle, [_RECOVERY_ACTION])[0]
    if answer.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(answer.nvmlReturn)
    return (answer.value.uiVal,)


def _nvlinks(handle: Any) -> tuple[Any, ...]:
    """How many links are up, and how many the GPU has."""
    states: list[bool] = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        active, code = _attempt(pynvml.nvmlDeviceGetNvLinkState, handle, link)
        if code is None:
            states.append(bool(active))
        elif code not in _ABSENT and code != pynvml.NVML_ERROR_INVALID_ARGUMENT:
            raise pynvml.NVMLError(code)
    if not states:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return sum(states), len(states)


def _fabric(handle: Any) -> tuple[Any, ...]:
    info = pynvml.c_nvmlGpuFabricInfo_t()
    pynvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
    return info.state, info.status


_STATIC: Final[tuple[Query, ...]] = (
    (("uuid",), (_one("nvmlDeviceGetUUID"),)),
    (("pci_id",), (_one("nvmlDeviceGetPciInfo_v3", then=lambda info: info.busId),)),
    (("name",), (_one("nvmlDeviceGetName"),)),
    (("architecture",), (_one("nvmlDeviceGetArchitecture"),)),
    (("compute",), (_one("nvmlDeviceGetCudaComputeCapability"),)),
    (("brand",), (_one("nvmlDeviceGetBrand"),)),
)

_FAST: Final[tuple[Query, ...]] = (
    (("total_bytes", "used_bytes", "free_bytes", "memory_version"), (_memory_v2, _memory_v1)),
    (("persistence",), (_one("nvmlDeviceGetPersistenceMode", then=bool),)),
    (("utilization_percent",), (_one("nvmlDeviceGetUtilizationRates", then=lambda rates: rates.gpu),)),
    (("temperature_c",), (_one("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU),)),
    (("power_w",), (_one("nvmlDeviceGetPowerUsage", then=_from_milli),)),
    (
        ("clock_reasons",),
        (_one("nvmlDeviceGetCurrentClocksEventReasons"), _one("nvmlDeviceGetCurrentClocksThrottleReasons")),
    ),
)

# The energy counter takes an H200 3.3 ms (up to 16 ms) of CPU, all of the fast group together 0.05 ms.
_SLOW: Final[tuple[Query, ...]] = (
    (("energy_j",), (_one("nvmlDeviceGetTotalEnergyConsumption", then=_from_milli),)),
    (("mig",), (_one("nvmlDeviceGetMigMode", then=lambda modes: bool(modes[0])),)),
    (
        ("ecc_uncorrected",),
        (_one("nvmlDeviceGetTotalEccErrors", pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC),),
    ),
    (("remap_pending", "remap_failed"), (_remapped_rows,)),
    (("recovery_action",), (_recovery_action,)),
)

_DEEP: Final[tuple[Query, ...]] = (
    (("nvlinks_up", "nvlinks"), (_nvlinks,)),
    (("fabric_state", "fabric_status"), (_fabric,)),
    (("retired_pending",), (_one("nvmlDeviceGetRetiredPagesPendingStatus", then=bool),)),
)


class Processes:
    """Who has memory on a GPU: compute and graphics, because another tenant's memory is not ours."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._seen: dict[int, str] = {}

    def begin(self, *, again: bool) -> None:
        """A sweep begins: forget the names of who is gone; `again`: of all, because a process can change its own."""
        self._names = {} if again else self._seen
        self._seen = {}

    def query(self) -> Query:
        """For a GPU of any kind."""
        compute = pynvml.nvmlDeviceGetComputeRunningProcesses_v3
        graphics = pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3
        return ("processes",), (
            lambda handle: (self._listed([*compute(handle), *graphics(handle)]),),
            lambda handle: (self._listed(compute(handle)),),
        )

    def _listed(self, found: Iterable[Any]) -> list[list[Any]]:
        used: dict[int, int | None] = {}
        for process in found:
            used[process.pid] = process.usedGpuMemory  # one that does both is in both lists, with the same memory
        return [[pid, used_bytes, self._name(pid)] for pid, used_bytes in used.items()]

    def _name(self, pid: int) -> str:
        name = self._names.get(pid)
        if name is None:
            name = _name_of(pid)
        self._seen[pid] = name
        return name


def _name_of(pid: int) -> str:
    try:
        comm = os.open(f"/proc/{pid}/comm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(comm, _NAME_BYTES).decode(errors="replace").strip()
    except OSError:
        return ""
    finally:
        os.close(comm)


class Gpu:
    """One GPU under one index since NVML was initialised. `identity` is None as long as it has never said its UUID."""

    def __init__(self, index: int, remembered: dict[str, Any] | None, avoided: dict[str, Any] | None) -> None:
        """`avoided`: what it is called, if not even its handle may be asked for."""
        self.index = index
        self.identity: dict[str, Any] | None = avoided
        self.handle: Any = None
        self.error: int | None = None
        self._ways: dict[tuple[str, ...], list[Way]] = {}
        self._unsupported: list[str] = []
        self._static_problems: dict[str, int] = {}
        self._remembered = remembered
        if avoided is None:
            self.find()

    def find(self) -> None:
        """Get the handle and the identity, if they are not known yet."""
        handle, self.error = _attempt(pynvml.nvmlDeviceGetHandleByIndex, self.index)
        if self.error is not None:
            return
        values: dict[str, Any] = {}
        problems: dict[str, int] = {}
        self._ask(handle, _STATIC, values, problems)
        self.error = problems.get("uuid", problems.get("pci_id"))
        if self.error is None and "uuid" in values and "pci_id" in values:
            self.handle, self.identity, self._static_problems = handle, values, problems

    def inherit(self, taken: set[str]) -> None:
        """Be called what the GPU of this index was called before, unless another one says that this is its name."""
        if self.identity is None and self._remembered is not None and self._remembered["uuid"] not in taken:
            self.identity = self._remembered

    def is_one_of(self, avoid: Avoid) -> bool:
        """Whether no call may touch it."""
        return self.identity is not None and self.identity["uuid"] in avoid

    def read(self, queries: Iterable[Query], avoid: Avoid) -> dict[str, Any]:
        """What `GpuReading` holds."""
        values: dict[str, Any] = {"uuid": "", "pci_id": "", **(self.identity or {}), "index": self.index}
        if self.is_one_of(avoid):
            self.error = pynvml.NVML_ERROR_RESET_REQUIRED
            return values | {"error": self.error}
        if self.handle is None:
            return values | {"error": pynvml.NVML_ERROR_UNKNOWN if self.error is None else self.error}
        problems: dict[str, int] = {}
        answered = self._ask(self.handle, queries, values, problems)
        self.error = None
        if problems and not answered:
            codes = problems.values()
            self.error = next((code for code in _LOST if code in codes), max(codes))
        return values | {
            "error": self.error,
            "problems": self._static_problems | problems,
            "unsupported": self._unsupported,
        }

    def _ask(self, handle: Any, queries: Iterable[Query], values: dict[str, Any], problems: dict[str, int]) -> bool:
        """Put in what is known and what failed. Whether the GPU answered anything, if only that it lacks something."""
        answered = False
        for fields, ways in queries:
            left = self._ways.setdefault(fields, list(ways))
            while left:
                got, code = _attempt(left[0], handle)
                if code is None:
                    values.update(zip(fields, got, strict=True))
                    answered = True
                    break
                if code not in _ABSENT:
                    problems.update(dict.fromkeys(fields, code))
                    break
                answered = True
                left.pop(0)
                if not left:
                    self._unsupported.extend(fields)
        return answered


class XidWatch:
    """Waits for Xids in a thread. A GPU that has no such events is not watched, which says nothing about its health."""

    def __init__(self, gpus: Iterable[Gpu], tell: Callable[[dict[str, Any]], None]) -> None:
        self._tell = tell
        self._uuids: dict[int | None, str] = {}
        self._stopped = threading.Event()
        self._failing = False
        self._thread: threading.Thread | None = None
        self._set, code = _attempt(pynvml.nvmlEventSetCreate)
        if code is not None:
            return
        for gpu in gpus:
            if gpu.handle is not None and gpu.identity is not None and self._register(gpu.handle):
                self._uuids[_address(gpu.handle)] = gpu.identity["uuid"]
        if self._uuids:
            self._thread = threading.Thread(target=self._wait, name="xids", daemon=True)
            self._thread.start()

    @property
    def watched(self) -> list[str]:
        """UUIDs of the GPUs whose Xids would be told."""
        return [] if self._failing else list(self._uuids.values())

    def close(self) -> None:
        """Stop waiting, and release what was made for it. Raises RuntimeError when the driver does not return."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)
            if self._thread.is_alive():
                raise RuntimeError("the driver does not return from waiting for events")
        if self._set is not None:
            _attempt(pynvml.nvmlEventSetFree, self._set)

    def _register(self, handle: Any) -> bool:
        """Registering fails as a whole if one bit is not supported."""
        supported, code = _attempt(pynvml.nvmlDeviceGetSupportedEventTypes, handle)
        if code is not None or not supported & pynvml.nvmlEventTypeXidCriticalError:
            return False
        return (
            _attempt(pynvml.nvmlDeviceRegisterEvents, handle, pynvml.nvmlEventTypeXidCriticalError, self._set)[1]
            is None
        )

    def _wait(self) -> None:
        while not self._stopped.is_set():
            event, code = _attempt(pynvml.nvmlEventSetWait_v2, self._set, _WAIT_MS)
            self._failing = code is not None and code != pynvml.NVML_ERROR_TIMEOUT
            if self._failing:
                self._stopped.wait(_PAUSE_S)
            elif code is None and event.eventType == pynvml.nvmlEventTypeXidCriticalError:
                uuid = self._uuids.get(_address(event.device))
                if uuid is not None:
                    self._tell({"xid": event.eventData, "gpu": uuid, "at": time.monotonic()})


class Probe:
    """NVML, kept open: with persistence mode off, each closing and opening would initialise the GPUs anew (1-3 s)."""

    def __init__(self, tell: Callable[[dict[str, Any]], None]) -> None:
        self._tell = tell
        self._driver = ""
        self._gpus: list[Gpu] = []
        self._identities: list[dict[str, Any] | None] = []
        self._watch: XidWatch | None = None
        self._problem: int | None = pynvml.NVML_ERROR_UNINITIALIZED
        self._opened_at = 0.0
        self._again_s = _AGAIN_S
        self._processes = Processes()
        self._fast = (self._processes.query(), *_FAST)

    def sweep(self, number: int, avoid: Avoid, *, slow: bool) -> dict[str, Any]:
        """Look at every GPU once."""
        return self._look(number, avoid, _SLOW if slow else (), slow=slow)

    def survey(self, number: int, avoid: Avoid) -> dict[str, Any]:
        """Look at everything once."""
        seen = self._look(number, avoid, (*_SLOW, *_DEEP), slow=True)
        return seen | {"cuda": _attempt(pynvml.nvmlSystemGetCudaDriverVersion_v2)[0]}

    def _look(self, number: int, avoid: Avoid, more: Iterable[Query], *, slow: bool) -> dict[str, Any]:
        began = time.monotonic()
        self._prepare(avoid, slow=slow)
        self._processes.begin(again=slow)
        queries = (*self._fast, *more)
        readings = [gpu.read(queries, avoid) for gpu in self._gpus]
        return {
            "sweep": number,
            "slow": slow,
            "at": began,
            "took_ms": round((time.monotonic() - began) * _MILLI, 3),
            "driver": self._driver,
            "problem": self._problem,
            "xids": self._watch.watched if self._watch is not None else [],
            "gpus": readings,
        }

    def set_persistence(self, uuid: str, *, on: bool) -> dict[str, Any]:
        """Switch persistence mode of a GPU that was seen before."""
        handle = next((gpu.handle for gpu in self._gpus if gpu.identity and gpu.identity["uuid"] == uuid), None)
        if handle is None:
            code = pynvml.NVML_ERROR_NOT_FOUND if self._problem is None else self._problem
        else:
            _, code = _attempt(pynvml.nvmlDeviceSetPersistenceMode, handle, int(on))
        return {"persistence": uuid, "on": on, "error": code}

    def _prepare(self, avoid: Avoid, *, slow: bool) -> None:
        """Initialise if that has not succeeded yet, if the number of GPUs changed, or sometimes while none answers."""
        if self._problem is None:
            count, code = _attempt(pynvml.nvmlDeviceGetCount)
            if code is None and count == len(self._gpus) and not self._is_hopeless(avoid, slow=slow):
                for gpu in self._gpus:
                    if slow and gpu.handle is None and not gpu.is_one_of(avoid):
                        gpu.find()
                return
            self._close()
        self._problem = self._open(avoid)

    def _is_hopeless(self, avoid: Avoid, *, slow: bool) -> bool:
        """Whether initialising anew might help. A GPU that is lost is not found again by that, or only by chance."""
        codes = [gpu.error for gpu in self._gpus if not gpu.is_one_of(avoid)]
        if not codes or None in codes:
            self._again_s = _AGAIN_S
            return False
        if slow:
            return True
        soon = not any(code in _LOST for code in codes) and time.monotonic() >= self._opened_at + self._again_s
        if soon:
            self._again_s = min(_AGAIN_MAX_S, 2 * self._again_s)
        return soon

    def _open(self, avoid: Avoid) -> int | None:
        """Initialise NVML and list the GPUs; the code, if that failed."""
        self._opened_at = time.monotonic()
        _, code = _attempt(pynvml.nvmlInit)
        if code is not None:
            return code
        count, code = _attempt(pynvml.nvmlDeviceGetCount)
        if code is not None:
            _attempt(pynvml.nvmlShutdown)
            return code
        self._driver = _attempt(pynvml.nvmlSystemGetDriverVersion)[0] or ""
        same = len(self._identities) == count
        before = self._identities if same else [None] * count
        # Where the number of GPUs has changed, an index of before may be that of another one.
        dead = self._avoided(avoid) if same or not self._identities else {}
        self._gpus = [Gpu(index, before[index], dead.get(index)) for index in range(count)]
        taken = {gpu.identity["uuid"] for gpu in self._gpus if gpu.identity is not None}
        for gpu in self._gpus:
            gpu.inherit(taken)
        self._identities = [gpu.identity for gpu in self._gpus]
        self._watch = XidWatch(self._gpus, self._tell)
        return None

    def _avoided(self, avoid: Avoid) -> dict[int, dict[str, Any]]:
        """Identities of GPUs that must not be asked for theirs, by index."""
        known = {place: identity for place, identity in enumerate(self._identities) if identity is not None}
        seen = {place: identity for place, identity in known.items() if identity["uuid"] in avoid}
        named = {identity["uuid"] for identity in seen.values()}
        told = {
            index: {"uuid": uuid, "pci_id": pci_id}
            for uuid, (pci_id, index) in avoid.items()
            if index is not None and index not in known and uuid not in named
        }
        return {**told, **seen}

    def _close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._watch = None
        self._gpus = []
        _attempt(pynvml.nvmlShutdown)


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def _end(error: BaseException | None) -> None:
    """No thread of the probe ends alone, and what it says last is one line."""
    if not isinstance(error, BrokenPipeError):  # then nobody reads any more: the daemon is gone
        os.write(sys.stderr.fileno(), f"{error!r}\n".encode(errors="replace"))
    os._exit(1)


def main() -> None:
    """Answer requests until stdin ends."""
    sys.excepthook = lambda _kind, error, _trace: _end(error)
    threading.excepthook = lambda ended: _end(ended.exc_value)
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    output = threading.Lock()

    def read() -> None:
        for line in sys.stdin.buffer:
            requests.put(json.loads(line))
        os._exit(0)

    def tell(answer: dict[str, Any]) -> None:
        with output:
            sys.stdout.write(_encode(answer) + "\n")
            sys.stdout.flush()

    threading.Thread(target=read, name="requests", daemon=True).start()
    probe = Probe(tell)
    while True:
        request = requests.get()
        if "sweep" in request:
            avoid = {uuid: (pci_id, index) for uuid, pci_id, index in request["avoid"]}
            deep = request.get("deep", False)
            number = request["sweep"]
            tell(probe.survey(number, avoid) if deep else probe.sweep(number, avoid, slow=request["slow"]))
        else:
            tell(probe.set_persistence(request["persistence"], on=request["on"]))


if __name__ == "__main__":
    main()
