"""Faults of GPUs, of their driver, and of the process that asks it."""

from __future__ import annotations

import os
import signal
import subprocess
from functools import partial
from random import Random

from tests.sim.nvml import GIB, SimGpu
from tests.storm.engine_faults import LONG, SHORT
from tests.storm.faults import Fault, NotNowError, On, Undo, add, fault, frozen, running, send
from tests.storm.stage import Stage

OURS_ALONE = "nvmlDeviceGetPersistenceMode"
"""A call that engines do not make: one that hangs for everybody would hang their starts too."""


def _gpu(stage: Stage, engine: str, rng: Random) -> SimGpu:
    gpus = stage.gpus_of(engine)
    if not gpus:
        raise NotNowError(f"{engine} has no GPU")
    return rng.choice(gpus)


def _clear(stage: Stage, gpu: SimGpu) -> None:
    gpu.come_back()
    stage.post("/v1/gpus/clear", {"gpu": gpu.uuid})


def _xid(number: int, stage: Stage, engine: str, rng: Random) -> Undo | None:
    gpu = _gpu(stage, engine, rng)
    stage.box.xid(gpu, number)
    return partial(_clear, stage, gpu)


for _name, _number in (("xid_hardware", 79), ("xid_gsp_timeout", 119), ("xid_application", 31), ("xid_harmless", 63)):
    add(Fault(_name, On.GPU, partial(_xid, _number), LONG))


@fault(On.GPU, LONG, shifts=True)
def gpu_lost(stage: Stage, engine: str, rng: Random) -> Undo | None:
    """Fallen off the bus: calls with its handle fail, and handles by UUID for every GPU."""
    gpu = _gpu(stage, engine, rng)
    gpu.lose()
    return partial(_clear, stage, gpu)


@fault(On.GPUS, LONG, shifts=True)
def two_gpus_lost(stage: Stage, _: str, rng: Random) -> Undo | None:
    """At once: of one engine, or of two."""
    gpus = rng.sample(stage.gpus_of(*stage.victims), 2)
    for gpu in gpus:
        gpu.lose()

    def undo() -> None:
        for gpu in gpus:
            _clear(stage, gpu)

    return undo


@fault(On.GPUS, LONG, shifts=True)
def gpu_vanishes(stage: Stage, _: str, rng: Random) -> Undo | None:
    """No longer counted: the indices of the others shift, and whoever is started meanwhile may get another GPU."""
    gpu = rng.choice(stage.gpus_of(*stage.victims))
    gpu.vanish()
    return partial(_clear, stage, gpu)


@fault(On.GPU, LONG)
def gpu_needs_reset(stage: Stage, engine: str, rng: Random) -> Undo | None:
    """The driver wants the GPU to be reset."""
    gpu = _gpu(stage, engine, rng)
    gpu.recovery_action(1)

    def undo() -> None:
        gpu.recovery_action(0)
        _clear(stage, gpu)

    return undo


@fault(On.GPU, LONG)
def gpu_memory_stays(stage: Stage, engine: str, rng: Random) -> Undo | None:
    """The engine dies and its memory does not come back (A12)."""
    gpu = _gpu(stage, engine, rng)
    pid = running(stage, engine)
    gpu.set(hold="1")
    send(pid, signal.SIGKILL)
    return partial(gpu.set, hold=None)


@fault(On.GPU, LONG)
def gpu_tenant(stage: Stage, engine: str, rng: Random) -> Undo | None:
    """Somebody else takes memory on the same GPU."""
    gpu = _gpu(stage, engine, rng)
    tenant = subprocess.Popen(["/bin/sleep", "3600"])
    gpu.process(tenant.pid, 60 * GIB)

    def undo() -> None:
        gpu.process(tenant.pid, None)
        tenant.kill()
        tenant.wait(10)

    return undo


@fault(On.GPU, SHORT)
def gpu_numbers_missing(stage: Stage, engine: str, rng: Random) -> Undo | None:
    """Values that a driver does not support from one moment to the next (A39)."""
    gpu = _gpu(stage, engine, rng)
    names = ("temperature", "power_mw", "utilization_gpu", "energy_mj", "clock_reasons")
    before = {name: gpu.get(name) for name in names}
    gpu.set(**dict.fromkeys(names))
    return partial(gpu.set, **before)


@fault(On.GPU, SHORT)
def gpu_throttles(stage: Stage, engine: str, rng: Random) -> Undo | None:
    """Hot, and slowed down by the hardware (A43)."""
    gpu = _gpu(stage, engine, rng)
    gpu.set(temperature=96, clock_reasons="0x48")
    return partial(gpu.set, temperature=35, clock_reasons="0x1")


@fault(On.GPU, LONG)
def nvml_gpu_fails(stage: Stage, engine: str, rng: Random) -> Undo | None:
    """Unknown Error for every call with the handle of a GPU (A38)."""
    gpu = _gpu(stage, engine, rng)
    gpu.fault("every", 999)
    return partial(gpu.fault, "every", None)


@fault(On.SIGHT, (8.0, 20.0))
def nvml_hangs(stage: Stage, _: str, rng: Random) -> Undo | None:
    """A call that never returns (A36)."""
    gpu = rng.choice(stage.box.gpus())
    gpu.fault(OURS_ALONE, "hang 600")
    return partial(gpu.fault, OURS_ALONE, None)


def _init(code: int, stage: Stage, _: str, __: Random) -> Undo | None:
    """Of the probe that is begun anew, so this one ends."""
    stage.box.fault("nvmlInitWithFlags", code)
    _end_probe(stage)
    return partial(stage.box.fault, "nvmlInitWithFlags", None)


for _name, _code in (("driver_mismatch", 18), ("driver_not_loaded", 9), ("driver_permission", 4)):
    add(Fault(_name, On.SIGHT, partial(_init, _code), LONG))


def _end_probe(stage: Stage) -> None:
    pid = stage.probe_helper() if stage.up else None
    if pid is None:
        raise NotNowError("no probe runs")
    os.kill(pid, signal.SIGKILL)


@fault(On.SIGHT)
def probe_sigkill(stage: Stage, _: str, __: Random) -> Undo | None:
    """The process that asks NVML dies."""
    _end_probe(stage)
    return None


@fault(On.SIGHT, (2.0, 12.0))
def probe_sigstop(stage: Stage, _: str, __: Random) -> Undo | None:
    """It is frozen, as in a call that sits in the kernel."""
    pid = stage.probe_helper() if stage.up else None
    if pid is None:
        raise NotNowError("no probe runs")
    return frozen(stage, pid)


@fault(On.SIGHT, SHORT)
def operator_gpu_release(stage: Stage, _: str, __: Random) -> Undo | None:
    """NVML is closed for a reset of a GPU, and opened again by `gpu clear`."""
    if not stage.up:
        raise NotNowError("nobody to ask")
    stage.post("/v1/gpus/release")
    return partial(stage.post, "/v1/gpus/clear", {"gpu": stage.box.gpu(0).uuid})
