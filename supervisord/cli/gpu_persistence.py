"""`gpu persistence`: set persistence mode as the configuration wants it, without the daemon."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

from supervisord.cli import DENIED, INVALID, NO, OK, TIMED_OUT, complain
from supervisord.cli.check_config import print_problems
from supervisord.cli.render import clean
from supervisord.config import ConfigError, daemon_is_root, load
from supervisord.core import persistence, telemetry
from supervisord.core.gpu_inventory import label
from supervisord.core.gpu_samples import GpuReading, GpuSweep
from supervisord.core.gpus import as_seen
from supervisord.core.messages import GpuHelperEnded, GpuObservation, GpusSwept, PersistenceSet
from supervisord.core.model import Gpu, Persistence
from supervisord.core.spec import GpuSpec
from supervisord.gpu.client import GpuProbe

PATIENCE_S: Final = telemetry.FIRST_DEADLINE_S
"""For one answer of the probe; initialising the driver takes 1 to 3 s for each GPU."""
_HELPER: Final = 1
_NO_PERMISSION: Final = 4
"""NVML_ERROR_NO_PERMISSION."""

T = TypeVar("T", GpusSwept, PersistenceSet)


class _ProbeError(Exception):
    """The probe does not answer; the message says why."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class _Task:
    """One GPU: what is wanted, what was seen, what has come of it. `failed`: why it is not as wanted."""

    gpu: Gpu
    wanted: bool | None
    why: str
    was: bool | None
    now: bool | None
    failed: str = ""
    code: int = OK


def main(args: argparse.Namespace) -> int:
    """Set what differs, tell each GPU in a line, and return the worst outcome."""
    path = Path(args.config)
    try:
        loaded = load(path, trust=daemon_is_root(path), check_files=False)
    except ConfigError as error:
        print_problems(error.problems, path)
        return INVALID
    session = _Session()
    try:
        tasks = _run(session, loaded.spec.gpu, dry_run=args.dry_run)
    except _ProbeError as error:
        complain(f"cannot set persistence mode: {error}")
        return error.code
    finally:
        session.close()
    for task in tasks:
        print(clean(_forecast(task) if args.dry_run else _line(task)))
    for task in tasks:
        if task.failed:
            complain(f"cannot set persistence mode of {label(task.gpu)}: {task.failed}")
    if not tasks:
        print("no GPUs")
    if args.dry_run and any(task.wanted is not None and task.was is not task.wanted for task in tasks):
        return NO
    return max((task.code for task in tasks), default=OK)


class _Session:
    """One probe, asked one thing after the other."""

    def __init__(self) -> None:
        self._said: SimpleQueue[GpuObservation] = SimpleQueue()
        self._probe = GpuProbe(self._said.put, lambda _pid: None)
        self._probe.start(_HELPER)
        self._number = 0

    def close(self) -> None:
        self._probe.close()

    def sweep(self) -> GpuSweep:
        """Look at all GPUs. Raises _ProbeError."""
        self._number += 1
        self._probe.sweep(_HELPER, self._number, slow=True)
        sweep = self._wait(GpusSwept).sweep
        if sweep.problem is not None:
            why = telemetry.no_driver(sweep.problem).message
            raise _ProbeError(why, DENIED if sweep.problem == _NO_PERMISSION else NO)
        return sweep

    def set(self, uuid: str, *, on: bool) -> int | None:
        """Switch one GPU; the NVML code, None: done. Raises _ProbeError."""
        self._probe.set_persistence(_HELPER, uuid, on=on)
        return self._wait(PersistenceSet).error

    def _wait(self, kind: type[T]) -> T:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                said = self._said.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                text = f"NVML has not answered for {PATIENCE_S:g} s; see dmesg, a reboot is likely to be needed"
                raise _ProbeError(text, TIMED_OUT) from None
            if isinstance(said, kind):
                return said
            if isinstance(said, GpuHelperEnded):
                raise _ProbeError(said.detail, NO)


def _run(session: _Session, spec: GpuSpec, *, dry_run: bool) -> list[_Task]:
    sweep = session.sweep()
    tasks = [_plan(reading, sweep, spec) for reading in sweep.gpus]
    errors = {
        task.gpu.uuid: session.set(task.gpu.uuid, on=task.wanted)
        for task in tasks
        if task.wanted is not None and task.was is not task.wanted and not task.failed and not dry_run
    }
    if not errors:
        return tasks
    after = {reading.uuid: reading.persistence for reading in session.sweep().gpus}
    return [
        _settled(task, errors[task.gpu.uuid], after.get(task.gpu.uuid)) if task.gpu.uuid in errors else task
        for task in tasks
    ]


def _plan(reading: GpuReading, sweep: GpuSweep, spec: GpuSpec) -> _Task:
    """What is wanted for one GPU, and what stands in the way."""
    blank = Gpu(reading.uuid or "UUID unknown", pci_id=reading.pci_id, index=reading.index)
    if reading.error is not None:
        failed = f"it does not answer (NVML code {reading.error})"
        return _Task(blank, None, "it cannot be looked at", None, None, failed, NO)
    gpu, was = as_seen(blank, reading, sweep), reading.persistence
    wanted, why = persistence.wanted(gpu, spec)
    task = _Task(gpu, wanted, why, was, was)
    if wanted is None or was is wanted:
        return task
    if was is None:
        if "persistence" in reading.unsupported:
            return replace(task, wanted=None, why="this GPU has no such mode")
        return replace(task, failed="how it is now cannot be read", code=NO)
    failed = persistence.obstacle(gpu, reading, Persistence(wanted=wanted)) or ""
    return replace(task, failed=failed, code=NO if failed else OK)


def _settled(task: _Task, error: int | None, now: bool | None) -> _Task:
    """What came of setting it."""
    failed, code = "", OK
    if error == _NO_PERMISSION:
        failed, code = "it needs root", DENIED
    elif error is not None:
        failed, code = f"NVML code {error}", NO
    elif now is not task.wanted:
        failed, code = "it was set, and is something else again (nvidia-persistenced?)", NO
    return replace(task, now=now, failed=failed, code=code)


def _forecast(task: _Task) -> str:
    """What a run would do."""
    if task.wanted is None:
        told = "would be left"
    elif task.was is task.wanted:
        told = "as wanted"
    else:
        told = f"{'wanted' if task.failed else 'would be set'} {_word(task.wanted)}"
    return f"{_name(task)}: is {_word(task.was)}, {told}; {task.why}"


def _line(task: _Task) -> str:
    wanted = "leave" if task.wanted is None else _word(task.wanted)
    return f"{_name(task)}: wanted {wanted}, was {_word(task.was)}, now {_word(task.now)}; {task.why}"


def _name(task: _Task) -> str:
    return f"{label(task.gpu)}, {task.gpu.name}" if task.gpu.name else label(task.gpu)


def _word(on: bool | None) -> str:
    return {None: "-", True: "on", False: "off"}[on]
