"""The simulated NVML library under the real nvidia-ml-py, and the simulated engine that allocates through it."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pynvml
import pytest

from tests.sim.engine import SimEngine, running, wait_until
from tests.sim.nvml import GIB, KINDS, MIB, NvmlBox, SimGpu, build

NO_SUCH_VALUE = pynvml.NVML_ERROR_NOT_SUPPORTED
LOST = pynvml.NVML_ERROR_GPU_IS_LOST
TIMEOUT = pynvml.NVML_ERROR_TIMEOUT
XID_EVENT = pynvml.nvmlEventTypeXidCriticalError


def code_of(call: Callable[[], Any]) -> int:
    """The NVML code that a call fails with; 0 when it does not."""
    try:
        call()
    except pynvml.NVMLError as error:
        return int(error.value)
    return 0


def used_bytes(handle: Any) -> int:
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)


def pids_on(handle: Any) -> dict[int, int | None]:
    return {process.pid: process.usedGpuMemory for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}


@contextmanager
def initialised(box: NvmlBox) -> Iterator[list[Any]]:
    """Handles of all GPUs, in the order of their indices."""
    with box.loaded():
        pynvml.nvmlInit()
        yield [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., NvmlBox]:
    return lambda *kinds: NvmlBox.make(tmp_path / "nvml", *kinds)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that a test may say holds memory."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait(10)


def child(box: NvmlBox, code: str, **options: Any) -> subprocess.Popen[str]:
    """Python with pynvml over the box, found by its soname alone."""
    text = f"import pynvml as n\n{code}"
    env = {"PATH": "/usr/bin:/bin", **box.env}
    return subprocess.Popen([sys.executable, "-c", text], env=env, stdout=subprocess.PIPE, text=True, **options)


# the library


def test_the_types_are_as_large_as_those_of_pynvml() -> None:
    types = {
        "nvmlMemory_t": pynvml.c_nvmlMemory_t,
        "nvmlMemory_v2_t": pynvml.c_nvmlMemory_v2_t,
        "nvmlProcessInfo_t": pynvml.c_nvmlProcessInfo_t,
        "nvmlEventData_t": pynvml.c_nvmlEventData_t,
        "nvmlPciInfo_t": pynvml.nvmlPciInfo_t,
        "nvmlFieldValue_t": pynvml.c_nvmlFieldValue_t,
        "nvmlUtilization_t": pynvml.c_nvmlUtilization_t,
        "nvmlTemperature_t": pynvml.c_nvmlTemperature_v1_t,
        "nvmlDeviceAddressingMode_t": pynvml.c_nvmlDeviceAddressingMode_t,
    }
    library = ctypes.CDLL(str(build()))
    library.sim_sizeof.restype = ctypes.c_ulong
    assert {name: library.sim_sizeof(name.encode()) for name in types} == {
        name: ctypes.sizeof(of_pynvml) for name, of_pynvml in types.items()
    }


def test_it_is_found_by_its_soname_and_speaks_for_the_box(make: Callable[..., NvmlBox]) -> None:
    box = make("h200", "h200")
    process = child(box, "n.nvmlInit(); print(n.nvmlDeviceGetCount(), n.nvmlSystemGetDriverVersion())")
    assert process.communicate(timeout=20)[0].split() == ["2", "580.159.04"]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_kind_of_gpu(make: Callable[..., NvmlBox], kind: str) -> None:
    wanted = KINDS[kind]
    with initialised(make("a100", kind)) as (_, handle):
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        assert pynvml.nvmlDeviceGetName(handle) == wanted["name"]
        assert pynvml.nvmlDeviceGetArchitecture(handle) == wanted["architecture"]
        assert f"{major}.{minor}" == wanted["compute"]
        assert pynvml.nvmlDeviceGetBrand(handle) == wanted["brand"]
        assert pynvml.nvmlDeviceGetPciInfo(handle).busId == "00000000:2B:00.0"
        assert pynvml.nvmlDeviceGetIndex(handle) == pynvml.nvmlDeviceGetMinorNumber(handle) == 1
        values: dict[str, Callable[[], Any]] = {
            "memory_total": lambda: used_bytes(handle),
            "ecc_mode": lambda: pynvml.nvmlDeviceGetEccMode(handle),
            "ecc_uncorrected_volatile": lambda: pynvml.nvmlDeviceGetTotalEccErrors(handle, 1, 0),
            "remap_pending": lambda: pynvml.nvmlDeviceGetRemappedRows(handle),
            "mig_mode": lambda: pynvml.nvmlDeviceGetMigMode(handle),
        }
        assert {name: code_of(call) for name, call in values.items()} == {
            name: 0 if name in wanted else NO_SUCH_VALUE for name in values
        }
        assert pids_on(handle) == {}


def test_the_values_are_those_in_the_files(make: Callable[..., NvmlBox]) -> None:
    box = make("h200")
    names = {"utilization_gpu": 97, "utilization_memory": 41, "temperature": 83, "power_mw": 512_000, "numa_node": 1}
    counters = {"energy_mj": 1 << 41, "clock_reasons": "0x88", "ecc_uncorrected_volatile": 3, "remap_failed": 1}
    with initialised(box) as (handle,):
        box.gpu(0).set(**names, **counters, mig_mode=1)
        rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
        assert (rates.gpu, rates.memory) == (97, 41)
        assert pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU) == 83
        assert pynvml.nvmlDeviceGetTemperatureV(handle, pynvml.NVML_TEMPERATURE_GPU) == 83
        assert pynvml.nvmlDeviceGetPowerUsage(handle) == 512_000
        assert pynvml.nvmlDeviceGetNumaNodeId(handle) == 1
        assert pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) == 1 << 41
        assert pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle) == 0x88
        assert pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) == 0x88
        assert pynvml.nvmlDeviceGetTotalEccErrors(handle, 1, 0) == 3
        assert pynvml.nvmlDeviceGetMemoryErrorCounter(handle, 1, 0, 2) == 3
        assert pynvml.nvmlDeviceGetTotalEccErrors(handle, 0, 0) == pynvml.nvmlDeviceGetTotalEccErrors(handle, 1, 1) == 0
        assert pynvml.nvmlDeviceGetRemappedRows(handle) == (0, 0, 0, 1)
        assert pynvml.nvmlDeviceGetMigMode(handle) == [1, 1]
        assert pynvml.nvmlDeviceGetAddressingMode(handle) == pynvml.NVML_DEVICE_ADDRESSING_MODE_HMM
        assert pynvml.nvmlSystemGetCudaDriverVersion_v2() == 13000
        assert pynvml.nvmlSystemGetNVMLVersion() == "13.580.159.04"


def test_fields(make: Callable[..., NvmlBox]) -> None:
    box = make("h200")
    box.gpu(0).recovery_action(2)
    with initialised(box) as (handle,):
        known, unknown = pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, 1])
        assert (known.nvmlReturn, known.value.uiVal, known.valueType) == (0, 2, pynvml.NVML_VALUE_TYPE_UNSIGNED_INT)
        assert unknown.nvmlReturn == NO_SUCH_VALUE


def test_an_old_driver(make: Callable[..., NvmlBox]) -> None:
    box = make("a100")
    box.old_driver()
    with initialised(box) as (handle,):
        assert code_of(lambda: used_bytes(handle)) == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
        assert pynvml.nvmlDeviceGetMemoryInfo(handle).used == KINDS["a100"]["memory_reserved"]
        (action,) = pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
        assert action.nvmlReturn == NO_SUCH_VALUE
        assert pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) == 1


# initialised or not


def test_nothing_works_before_init_and_after_as_many_shutdowns(make: Callable[..., NvmlBox]) -> None:
    with make("h200").loaded():
        assert code_of(pynvml.nvmlDeviceGetCount) == pynvml.NVML_ERROR_UNINITIALIZED
        pynvml.nvmlInit()
        pynvml.nvmlInit()
        pynvml.nvmlShutdown()
        assert pynvml.nvmlDeviceGetCount() == 1
        pynvml.nvmlShutdown()
        assert code_of(pynvml.nvmlDeviceGetCount) == pynvml.NVML_ERROR_UNINITIALIZED
        assert code_of(pynvml.nvmlShutdown) == pynvml.NVML_ERROR_UNINITIALIZED


def test_a_forked_child_has_to_initialise_itself(make: Callable[..., NvmlBox]) -> None:
    forked = """
import os
n.nvmlInit()
if os.fork() == 0:
    try:
        n.nvmlDeviceGetCount()
    except n.NVMLError as error:
        print(error.value, flush=True)
    n.nvmlInit()
    print(n.nvmlDeviceGetCount(), flush=True)
    os._exit(0)
os.wait()
print(n.nvmlDeviceGetCount())
"""
    assert child(make("h200"), forked).communicate(timeout=20)[0].split() == ["1", "1", "1"]


@pytest.mark.parametrize("code", [4, 9, 18, 999])
def test_init_fails_as_told_until_it_works(make: Callable[..., NvmlBox], code: int) -> None:
    box = make("h200")
    box.fault("nvmlInitWithFlags", code)
    with box.loaded():
        assert code_of(pynvml.nvmlInit) == code
        box.fault("nvmlInitWithFlags", None)
        assert code_of(pynvml.nvmlInit) == 0


def test_without_a_box_the_driver_is_not_loaded(make: Callable[..., NvmlBox], tmp_path: Path) -> None:
    with make("h200").loaded():
        os.environ["SIM_NVML"] = str(tmp_path / "missing")
        assert code_of(pynvml.nvmlInit) == pynvml.NVML_ERROR_DRIVER_NOT_LOADED


# faults


def test_a_function_that_fails_on_one_gpu_or_on_all(make: Callable[..., NvmlBox]) -> None:
    box = make("h200", "h200")
    with initialised(box) as (first, second):
        box.gpu(1).fault("nvmlDeviceGetPowerUsage", 999)
        box.fault("nvmlDeviceGetUUID", 4)
        assert [code_of(partial(pynvml.nvmlDeviceGetPowerUsage, handle)) for handle in (first, second)] == [0, 999]
        assert [code_of(partial(pynvml.nvmlDeviceGetUUID, handle)) for handle in (first, second)] == [4, 4]
        box.gpu(0).fault("every", 16)
        assert code_of(lambda: pynvml.nvmlDeviceGetName(first)) == 16
        assert code_of(lambda: pynvml.nvmlDeviceGetName(second)) == 0


def test_every_code_has_its_text(make: Callable[..., NvmlBox]) -> None:
    with make("h200").loaded():
        assert [pynvml.nvmlErrorString(code) for code in (0, 3, 15, 18, 999)] == [
            "Success",
            "Not Supported",
            "GPU is lost",
            "RM has detected an NVML/RM version mismatch.",
            "Unknown Error",
        ]


def test_a_call_that_hangs_is_ended_by_sigkill_alone(make: Callable[..., NvmlBox]) -> None:
    box = make("h200")
    box.gpu(0).fault("nvmlDeviceGetTemperature", "hang 60")
    code = """
import signal
signal.signal(signal.SIGUSR1, lambda *_: None)
n.nvmlInit()
handle = n.nvmlDeviceGetHandleByIndex(0)
print("calling", flush=True)
n.nvmlDeviceGetTemperature(handle, 0)
"""
    with child(box, code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "calling\n"
        for _ in range(3):
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.1)
            process.send_signal(signal.SIGUSR1)
        process.kill()
        assert process.wait(10) == -signal.SIGKILL


def test_a_hang_that_ends_goes_on_as_if_nothing_was(make: Callable[..., NvmlBox]) -> None:
    box = make("h200")
    with initialised(box) as (handle,):
        box.gpu(0).fault("every", "hang 0.1")
        began = time.monotonic()
        assert pynvml.nvmlDeviceGetTemperature(handle, 0) == 35
        assert time.monotonic() - began >= 0.1


# lost and gone


@pytest.mark.parametrize("code", [15, 999])
def test_a_lost_gpu_among_others(make: Callable[..., NvmlBox], code: int) -> None:
    box = make("rtx3090", "rtx4090", "h100")
    with initialised(box) as (first, second, third):
        box.gpu(1).lose(code)
        assert pynvml.nvmlDeviceGetCount() == 3
        assert code_of(lambda: pynvml.nvmlDeviceGetUUID(second)) == LOST
        assert code_of(lambda: used_bytes(second)) == LOST
        assert code_of(lambda: pynvml.nvmlDeviceGetHandleByIndex(1)) == code
        assert code_of(lambda: pynvml.nvmlDeviceGetHandleByPciBusId(box.gpu(1).pci_id.encode())) == LOST
        for gpu, handle in ((box.gpu(0), first), (box.gpu(2), third)):
            assert pynvml.nvmlDeviceGetUUID(handle) == gpu.uuid
            assert code_of(partial(pynvml.nvmlDeviceGetHandleByUUID, gpu.uuid.encode())) == LOST
            assert code_of(partial(pynvml.nvmlDeviceGetHandleByPciBusId, gpu.pci_id.encode())) == 0
        box.gpu(1).come_back()
        assert pynvml.nvmlDeviceGetUUID(second) == box.gpu(1).uuid


def test_a_gpu_that_is_gone_shifts_the_indices_but_not_the_handles(make: Callable[..., NvmlBox]) -> None:
    box = make("rtx3090", "rtx4090", "h100")
    with initialised(box) as (first, second, third):
        box.gpu(1).vanish()
        assert pynvml.nvmlDeviceGetCount() == 2
        assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(1)) == box.gpu(2).uuid
        assert pynvml.nvmlDeviceGetIndex(third) == 1
        assert code_of(lambda: pynvml.nvmlDeviceGetUUID(second)) == LOST
        assert (
            code_of(lambda: pynvml.nvmlDeviceGetHandleByUUID(box.gpu(1).uuid.encode())) == pynvml.NVML_ERROR_NOT_FOUND
        )
        by_uuid = pynvml.nvmlDeviceGetHandleByUUID(box.gpu(0).uuid.encode())
        assert pynvml.nvmlDeviceGetName(by_uuid) == pynvml.nvmlDeviceGetName(first)
        assert code_of(lambda: pynvml.nvmlDeviceGetHandleByIndex(2)) == pynvml.NVML_ERROR_INVALID_ARGUMENT


# memory


def test_memory_of_both_versions(make: Callable[..., NvmlBox], sleeper: subprocess.Popen[bytes]) -> None:
    box = make("h200")
    total, reserved = KINDS["h200"]["memory_total"], KINDS["h200"]["memory_reserved"]
    box.gpu(0).process(sleeper.pid, 3 * GIB)
    box.gpu(0).process(os.getpid(), GIB)
    with initialised(box) as (handle,):
        old, new = (pynvml.nvmlDeviceGetMemoryInfo(handle, version=v) for v in (None, pynvml.nvmlMemory_v2))
        assert (old.total, old.used, old.free) == (total, reserved + 4 * GIB, total - reserved - 4 * GIB)
        assert (new.total, new.used, new.free, new.reserved) == (total, 4 * GIB, old.free, reserved)
        assert pids_on(handle) == {sleeper.pid: 3 * GIB, os.getpid(): GIB}
        box.gpu(0).process(sleeper.pid, 3 * GIB + MIB)  # creep
        assert used_bytes(handle) == 4 * GIB + MIB
        box.gpu(0).process(sleeper.pid, None)
        assert pids_on(handle) == {os.getpid(): GIB}


def test_memory_that_nvml_cannot_attribute(make: Callable[..., NvmlBox]) -> None:
    box = make("rtx4090")
    gpu = box.gpu(0)
    gpu.process(os.getpid(), "na")
    gpu.process(os.getppid(), 50 * MIB, graphics=True)
    gpu.set(memory_other=5 * GIB)
    with initialised(box) as (handle,):
        assert pids_on(handle) == {os.getpid(): None}
        assert used_bytes(handle) == 5 * GIB + 50 * MIB
        (shown,) = pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle)
        assert (shown.pid, shown.usedGpuMemory) == (os.getppid(), 50 * MIB)


@pytest.mark.parametrize("reaped", [True, False])
def test_memory_outlives_its_process_a_little(
    make: Callable[..., NvmlBox], sleeper: subprocess.Popen[bytes], reaped: bool
) -> None:
    box = make("h200")
    box.set(release_ms=200)
    box.gpu(0).process(sleeper.pid, GIB)
    with initialised(box) as (handle,):
        assert used_bytes(handle) == GIB
        sleeper.kill()
        if reaped:
            sleeper.wait(10)
        wait_until(lambda: used_bytes(handle) and not box.gpu(0).processes(), 5, "a call to notice the death")
        began = time.monotonic()
        assert pids_on(handle) == {sleeper.pid: GIB}
        wait_until(lambda: used_bytes(handle) == 0, 5, "the memory to come back")
        assert 0.15 < time.monotonic() - began < 20
        assert pids_on(handle) == {}
        assert not any((box.gpu(0).folder / "procs").iterdir())


def test_a_driver_that_never_gives_memory_back(make: Callable[..., NvmlBox], sleeper: subprocess.Popen[bytes]) -> None:
    box = make("h200")
    box.set(release_ms=1)
    box.gpu(0).set(hold="")
    box.gpu(0).process(sleeper.pid, GIB)
    with initialised(box) as (handle,):
        sleeper.kill()
        sleeper.wait(10)
        used_bytes(handle)
        time.sleep(0.02)
        assert used_bytes(handle) == GIB
        assert pids_on(handle) == {}
        box.gpu(0).set(hold=None)
        assert used_bytes(handle) == 0


# persistence


def test_persistence(make: Callable[..., NvmlBox]) -> None:
    box = make("h200")
    with initialised(box) as (handle,):
        assert pynvml.nvmlDeviceGetPersistenceMode(handle) == 0
        wanted = 0 if os.geteuid() == 0 else pynvml.NVML_ERROR_NO_PERMISSION
        assert code_of(lambda: pynvml.nvmlDeviceSetPersistenceMode(handle, 1)) == wanted
        assert pynvml.nvmlDeviceGetPersistenceMode(handle) == int(box.gpu(0).get("persistence")) == int(not wanted)
        box.gpu(0).set(persistence=0)  # nvidia-persistenced was restarted
        box.gpu(0).fault("nvmlDeviceSetPersistenceMode", 0)  # claims success, does nothing
        assert code_of(lambda: pynvml.nvmlDeviceSetPersistenceMode(handle, 1)) == 0
        assert pynvml.nvmlDeviceGetPersistenceMode(handle) == 0
        box.gpu(0).set(persistence=None)
        box.gpu(0).fault("nvmlDeviceSetPersistenceMode", None)
        assert code_of(lambda: pynvml.nvmlDeviceSetPersistenceMode(handle, 1)) == NO_SUCH_VALUE


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody")
def test_nobody_reads_everything_and_sets_nothing() -> None:
    folder = Path(tempfile.mkdtemp())  # pytest's own folders are closed to others
    folder.chmod(0o755)
    try:
        box = NvmlBox.make(folder / "nvml", "h200")
        box.gpu(0).process(os.getpid(), GIB)
        code = f"""
import os
os.setuid(65534)
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
print(n.nvmlDeviceGetPersistenceMode(h), n.nvmlDeviceGetComputeRunningProcesses(h)[0].pid == {os.getpid()})
try:
    n.nvmlDeviceSetPersistenceMode(h, 1)
except n.NVMLError as error:
    print(error.value)
"""
        assert child(box, code).communicate(timeout=20)[0].split() == ["0", "True", "4"]
    finally:
        shutil.rmtree(folder)


# events


def watching(*handles: Any) -> Any:
    events = pynvml.nvmlEventSetCreate()
    for handle in handles:
        pynvml.nvmlDeviceRegisterEvents(handle, XID_EVENT, events)
    return events


def test_an_xid_reaches_a_waiting_thread_while_others_call(make: Callable[..., NvmlBox]) -> None:
    box = make("h200", "h200")
    box.xid(box.gpu(1), 13, 4711)  # before the set was made: nobody hears of it
    with initialised(box) as (first, second):
        events = watching(first, second)
        seen: list[Any] = []
        thread = threading.Thread(target=lambda: seen.append(pynvml.nvmlEventSetWait_v2(events, 10_000)))
        thread.start()
        assert pynvml.nvmlDeviceGetTemperature(first, 0) == 35
        assert not seen
        box.xid(box.gpu(1), 79, 1234)
        thread.join(5)
        (event,) = seen
        assert (event.eventType, event.eventData) == (XID_EVENT, 79)
        assert pynvml.nvmlDeviceGetUUID(event.device) == box.gpu(1).uuid
        assert code_of(lambda: pynvml.nvmlEventSetWait_v2(events, 20)) == TIMEOUT
        pynvml.nvmlEventSetFree(events)


def test_events_come_one_by_one_and_only_those_asked_for(make: Callable[..., NvmlBox]) -> None:
    box = make("rtx3090", "rtx3090")
    with initialised(box) as (first, second):
        events = watching(first)
        for gpu, xid in ((1, 43), (0, 13), (0, 31)):
            box.xid(box.gpu(gpu), xid)
        assert [pynvml.nvmlEventSetWait_v2(events, 0).eventData for _ in range(2)] == [13, 31]
        everything = pynvml.nvmlEventTypeAll
        assert code_of(lambda: pynvml.nvmlDeviceRegisterEvents(second, everything, events)) == NO_SUCH_VALUE
        pynvml.nvmlDeviceRegisterEvents(second, pynvml.nvmlDeviceGetSupportedEventTypes(second) & everything, events)
        box.gpu(1).set(event_types=None)
        assert code_of(lambda: pynvml.nvmlDeviceGetSupportedEventTypes(second)) == NO_SUCH_VALUE


def test_a_lost_gpu_ends_the_wait_after_its_last_xid(make: Callable[..., NvmlBox]) -> None:
    box = make("h200")
    with initialised(box) as (handle,):
        events = watching(handle)
        box.xid(box.gpu(0), 79)
        box.gpu(0).lose()
        assert pynvml.nvmlEventSetWait_v2(events, 1000).eventData == 79
        assert code_of(lambda: pynvml.nvmlEventSetWait_v2(events, 10_000)) == LOST


# the simulated engine

UTIL = "--gpu-memory-utilization"
KV_STEP = 16 * 98304  # bytes of a block of 16 tokens


@contextmanager
def engines(box: NvmlBox, tmp_path: Path) -> Iterator[Callable[..., SimEngine]]:
    """Starts engines on GPUs of the box: start("0,1", "-tp", "2", gpu_mib=...)."""
    with ExitStack() as stack:

        def start(gpus: str, *args: str, env: dict[str, str] | None = None, **mood: Any) -> SimEngine:
            folder = Path(tempfile.mkdtemp(dir=tmp_path))
            order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": gpus}
            environment = {"SIM_NVML": str(box.folder), **order, **(env or {})}
            return stack.enter_context(running(folder, *args, mood=mood, env=environment))

        yield start


def held(gpu: SimGpu) -> int:
    return sum(gpu.processes().values())


def holds(gpu: SimGpu, wanted: int) -> bool:
    return held(gpu) == wanted


def blocks_of(engine: SimEngine) -> int:
    page = engine.get("/metrics").text
    return int(page.partition('num_gpu_blocks="')[2].partition('"')[0])


def cuda_total(kind: str) -> int:
    return int(KINDS[kind]["memory_total"] - KINDS[kind]["memory_reserved"])


def test_an_engine_takes_its_share_and_gives_it_back(make: Callable[..., NvmlBox], tmp_path: Path) -> None:
    box = make("rtx3090", "h200")
    with engines(box, tmp_path) as start, initialised(box) as (other, handle):
        engine = start("1", UTIL, "0.9").wait_ready()
        core = engine.pid_of("VLLM::EngineCore")
        budget = int(cuda_total("h200") * 0.9)
        weights = 1536 * MIB
        assert blocks_of(engine) == (budget - weights) // KV_STEP
        assert pids_on(handle) == {core: 2048 * MIB + blocks_of(engine) * KV_STEP}
        assert used_bytes(other) == 0
        assert f"GPU KV cache size: {blocks_of(engine) * 16:,} tokens" in engine.output()
        engine.terminate()
        assert engine.wait_exit() == 0
        assert used_bytes(handle) == 0


def test_the_memory_of_a_killed_engine_comes_back_late(make: Callable[..., NvmlBox], tmp_path: Path) -> None:
    box = make("h200")
    box.set(release_ms=300)
    with engines(box, tmp_path) as start, initialised(box) as (handle,):
        engine = start("0").wait_ready()
        os.killpg(engine.pid, signal.SIGKILL)
        engine.wait_exit()
        began = time.monotonic()
        assert used_bytes(handle) > 100 * GIB
        wait_until(lambda: used_bytes(handle) == 0, 5, "the memory to come back")
        assert time.monotonic() - began > 0.25


def test_an_engine_refuses_to_start_on_a_full_gpu(make: Callable[..., NvmlBox], tmp_path: Path) -> None:
    box = make("h200")
    box.gpu(0).process(os.getpid(), 60 * GIB)
    with engines(box, tmp_path) as start:
        engine = start("0", UTIL, "0.9")
        assert engine.wait_exit() == 1
        assert "ValueError: Free memory on device cuda:0 (79.3/139.8 GiB) on startup is less" in engine.output()
        assert "desired GPU memory utilization (0.9, 125.82 GiB)" in engine.output()
        assert "RuntimeError: Engine core initialization failed." in engine.output()
        assert blocks_of(start("0", UTIL, "0.5").wait_ready()) > 40_000


def test_one_after_the_other_both_have_the_same_pool(make: Callable[..., NvmlBox], tmp_path: Path) -> None:
    box = make("h200")
    with engines(box, tmp_path) as start:
        pools = [blocks_of(start("0", UTIL, "0.45").wait_ready()) for _ in range(2)]
        assert pools[0] == pools[1]


def test_two_at_once_profile_each_other(make: Callable[..., NvmlBox], tmp_path: Path) -> None:
    """One that began a little later takes the first one's KV cache for its own: a sliver is left, or nothing."""
    box = make("h200")
    args, load_s = (UTIL, "0.45", "--max-model-len", "4096"), 2
    with engines(box, tmp_path) as start:
        first = start("0", *args, ready_delay_s=load_s)
        wait_until(lambda: held(box.gpu(0)) > GIB, 10, "the first one's weights")
        second = start("0", *args, ready_delay_s=load_s).wait_ready()
        first.wait_ready()
        full = (int(cuda_total("h200") * 0.45) - 1536 * MIB) // KV_STEP
        assert blocks_of(second) < 0.1 * full
        assert blocks_of(first) < full  # its neighbour's context, taken for its own
        exact = [start("0", *args, "--kv-cache-memory-bytes", "1G", ready_delay_s=0.3) for _ in range(2)]
        assert [blocks_of(engine.wait_ready()) for engine in exact] == [GIB // KV_STEP] * 2


def test_each_worker_holds_memory_on_its_own_gpu(make: Callable[..., NvmlBox], tmp_path: Path) -> None:
    box = make("rtx4090", "rtx3090", "rtx4090")
    with engines(box, tmp_path) as start, initialised(box) as handles:
        engine = start("2,1", "-tp", "2", UTIL, "0.9").wait_ready()
        workers = [engine.pid_of(f"VLLM::Worker_TP{number}") for number in (0, 1)]
        assert [list(pids_on(handle)) for handle in handles] == [[], [workers[1]], [workers[0]]]
        smallest = int(cuda_total("rtx4090") * 0.9) - 1536 * MIB
        assert blocks_of(engine) == smallest // (KV_STEP // 2)
        before = held(box.gpu(1))
        engine.mood.patch(gpu_leak_mib_per_s=100)
        wait_until(lambda: held(box.gpu(1)) > before and held(box.gpu(2)) > before, 10, "both to grow")
        os.kill(workers[1], signal.SIGKILL)
        wait_until(lambda: used_bytes(handles[1]) == 0, 10, "its memory to come back")


def test_workspaces_grow_with_the_largest_batch_and_no_further(make: Callable[..., NvmlBox], tmp_path: Path) -> None:
    box = make("h200")
    with engines(box, tmp_path) as start:
        engine = start("0", "--max-num-batched-tokens", "8192", gpu_workspace_mib=1024).wait_ready()
        base = held(box.gpu(0))

        def send(tokens: int) -> None:
            engine.post("/v1/completions", {"prompt": [os.getpid() + n for n in range(tokens)], "max_tokens": 1})

        for tokens, grown_mib in ((2048, 256), (16384, 1024), (4096, 1024)):
            send(tokens)
            wait_until(partial(holds, box.gpu(0), base + grown_mib * MIB), 5, f"growth by {grown_mib} MiB")


def test_leaks_and_what_does_not_fit(make: Callable[..., NvmlBox], tmp_path: Path) -> None:
    box = make("rtx3090", "h200")
    with engines(box, tmp_path) as start:
        start("0", gpu_leak_mib_per_s=100).wait_ready()
        at_first = held(box.gpu(0))
        wait_until(lambda: held(box.gpu(0)) > at_first + 10 * MIB, 10, "growth")
        for gpus, args, text in (
            ("1", ("--max-model-len", "2M"), "max seq len (2097152), (192.0 GiB KV cache is needed"),
            ("1", (UTIL, "0.01"), "No available memory for the cache blocks"),
            ("7", (), "No CUDA GPUs are available"),
            (box.gpu(1).uuid, (), "invalid literal for int()"),
            ("0", ("-tp", "2", UTIL, "0.01"), "World size (2) is larger than the number of available GPUs (1)"),
        ):
            failed = start(gpus, *args)
            assert failed.wait_exit() == 1
            assert text in failed.output()


def test_memory_shared_with_the_host(make: Callable[..., NvmlBox], tmp_path: Path) -> None:
    box = make("gb10")
    with engines(box, tmp_path) as start, initialised(box) as (handle,):
        engine = start("0", UTIL, "0.8").wait_ready()
        assert blocks_of(engine) == (int(KINDS["gb10"]["memory_unified"] * 0.8) - 1536 * MIB) // KV_STEP
        assert pids_on(handle) == {engine.pid_of("VLLM::EngineCore"): held(box.gpu(0))}
        assert pynvml.nvmlDeviceGetAddressingMode(handle) == pynvml.NVML_DEVICE_ADDRESSING_MODE_ATS


def test_a_worker_that_cannot_start_takes_the_others_along(make: Callable[..., NvmlBox], tmp_path: Path) -> None:
    box = make("h200", "h200")
    box.gpu(1).set(memory_other=130 * GIB)
    with engines(box, tmp_path) as start, initialised(box) as handles:
        engine = start("0,1", "-tp", "2", ready_delay_s=0.5)
        assert engine.wait_exit() == 1
        assert "Free memory on device cuda:1 (9.3/139.8 GiB)" in engine.output()
        assert "WorkerProc initialization failed" in engine.output()
        wait_until(lambda: not pids_on(handles[0]) and not pids_on(handles[1]), 5, "all memory to come back")


def test_without_the_order_of_pci_ids_index_0_is_the_fastest(make: Callable[..., NvmlBox], tmp_path: Path) -> None:
    box = make("rtx3090", "h200")
    with engines(box, tmp_path) as start:
        start("0", env={"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}).wait_ready()
        assert held(box.gpu(0)) == 0
        assert held(box.gpu(1)) > GIB


def test_an_engine_without_gpus_leaves_them_alone(make: Callable[..., NvmlBox], tmp_path: Path) -> None:
    box = make("h200")
    with engines(box, tmp_path) as start:
        engine = start("").wait_ready()
        assert held(box.gpu(0)) == 0
        assert blocks_of(engine) == 16384
