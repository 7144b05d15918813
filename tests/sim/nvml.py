"""The simulated NVML library: build it, make GPUs, change them (see nvml/README.md).

    box = NvmlBox.make(tmp_path / "nvml", "h200", "rtx3090")
    subprocess.run(helper, env={**os.environ, **box.env})   # a child process: LD_LIBRARY_PATH and SIM_NVML
    box.gpu(0).set(temperature=81)

In this process, pynvml uses the library inside `with box.loaded():`.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

SOURCE = Path(__file__).with_name("nvml")
SONAME = "libnvidia-ml.so.1"
MIB = 1024 * 1024
GIB = 1024 * MIB

_FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", f"-Wl,-soname,{SONAME}")

BRAND_GEFORCE = 5
BRAND_NVIDIA = 14
_XID_PSTATE_CLOCK = 0x1C
_ECC_EVENTS = 0x3


def header_folder() -> Path:
    """Where nvml.h of the package nvidia-nvml-dev is."""
    for file in importlib.metadata.files("nvidia-nvml-dev") or []:
        if file.name == "nvml.h":
            return Path(str(file.locate())).parent
    raise AssertionError("cannot find nvml.h: install the development dependencies (nvidia-nvml-dev)")


def build() -> Path:
    """The library, compiled once for these sources and this header; later calls and sessions find it."""
    headers = header_folder()
    inputs = [SOURCE / "nvml.c", SOURCE / "state.h", headers / "nvml.h"]
    wanted = hashlib.sha256(b"".join(path.read_bytes() for path in inputs) + repr(_FLAGS).encode())
    folder = Path(tempfile.gettempdir()) / f"sim-nvml-{os.getuid()}-{wanted.hexdigest()[:16]}"
    folder.mkdir(mode=0o755, exist_ok=True)
    assert folder.stat().st_uid == os.getuid(), f"{folder} belongs to somebody else: nothing is loaded from there"
    library = folder / SONAME
    if not library.exists():
        fresh = folder / f"{os.getpid()}.so"
        command = ["gcc", *_FLAGS, "-isystem", str(headers), "-o", str(fresh), str(inputs[0])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"cannot build the simulated NVML library:\n{done.stderr}"
        fresh.replace(library)
    return library


def _geforce(name: str, architecture: int, compute: str, total_mib: int, reserved_mib: int) -> dict[str, Any]:
    return {
        "name": f"NVIDIA GeForce {name}",
        "architecture": architecture,
        "compute": compute,
        "brand": BRAND_GEFORCE,
        "memory_total": total_mib * MIB,
        "memory_reserved": reserved_mib * MIB,
        "event_types": hex(_XID_PSTATE_CLOCK),
        "addressing_mode": 0,
    }


def _data_center(name: str, architecture: int, compute: str, total_mib: int, reserved_mib: int) -> dict[str, Any]:
    return {
        "name": f"NVIDIA {name}",
        "architecture": architecture,
        "compute": compute,
        "brand": BRAND_NVIDIA,
        "memory_total": total_mib * MIB,
        "memory_reserved": reserved_mib * MIB,
        "event_types": hex(_XID_PSTATE_CLOCK | _ECC_EVENTS),
        "addressing_mode": 1,
        "mig_mode": 0,
        "ecc_mode": 1,
        "ecc_corrected_volatile": 0,
        "ecc_uncorrected_volatile": 0,
        "ecc_corrected_aggregate": 0,
        "ecc_uncorrected_aggregate": 0,
        "remap_corrected": 0,
        "remap_uncorrected": 0,
        "remap_pending": 0,
        "remap_failed": 0,
    }


# What every GPU has. A value that a kind lacks is a file that is not made.
_COMMON: dict[str, Any] = {
    "persistence": 0,
    "utilization_gpu": 0,
    "utilization_memory": 0,
    "temperature": 35,
    "power_mw": 25_000,
    "energy_mj": 1_000_000,
    "clock_reasons": "0x1",
    "field/230": 0,
}

# Names, numbers and memory as nvidia-smi shows them; reserved memory is measured for the H200 alone, the rest guessed.
KINDS: dict[str, dict[str, Any]] = {
    "rtx3090": _geforce("RTX 3090", 7, "8.6", 24576, 316),
    "rtx4090": _geforce("RTX 4090", 8, "8.9", 24564, 366) | {"ecc_mode": 0},  # it has ECC, switched off
    "rtx5090": _geforce("RTX 5090", 10, "12.0", 32607, 494),
    "a100": _data_center("A100-SXM4-80GB", 7, "8.0", 81920, 628),
    "h100": _data_center("H100 80GB HBM3", 9, "9.0", 81559, 551),
    "h200": _data_center("H200", 9, "9.0", 143771, 615),
    # Memory is the host's: NVML knows no total (gpud PR 1170, nvitop PR 208), processes it does.
    "gb10": {
        "name": "NVIDIA GB10",
        "architecture": 10,
        "compute": "12.1",
        "brand": BRAND_NVIDIA,
        "memory_unified": 119 * GIB,
        "event_types": hex(_XID_PSTATE_CLOCK),
        "addressing_mode": 2,
    },
}

# Functions that a driver of the 470 series does not have. Process lists are left, so that the fall-back to memory
# version 1 can be watched by itself.
_NEWER_FUNCTIONS = (
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetTemperatureV",
    "nvmlDeviceGetAddressingMode",
)


@dataclass(frozen=True)
class SimGpu:
    """One GPU: files in a folder. All changes are atomic, each file by itself."""

    folder: Path

    @property
    def uuid(self) -> str:
        return self.get("uuid")

    @property
    def pci_id(self) -> str:
        return self.get("pci_id")

    def get(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="ascii").strip()

    def set(self, **values: Any) -> None:
        """Value by name of the file; None removes the file: the value is not supported."""
        for name, value in values.items():
            write(self.folder / name, value)

    def fault(self, function: str, what: int | str | None) -> None:
        """A code, `hang 30`, or None: no longer. The function `every` stands for all calls with a handle."""
        write(self.folder / "fault" / function, what)

    def recovery_action(self, action: int | None) -> None:
        write(self.folder / "field/230", action)

    def process(self, pid: int, held_bytes: int | str | None, *, graphics: bool = False) -> None:
        """What a process holds; "na": NVML cannot say how much; None: nothing any more."""
        write(self.folder / ("graphics" if graphics else "procs") / str(pid), held_bytes)

    def processes(self) -> dict[int, int]:
        """Bytes by pid, dead or alive, as the files say; a dead one that some call has noticed is not among them."""
        found = {}
        for path in (self.folder / "procs").iterdir():
            if path.name.isdigit():
                with contextlib.suppress(FileNotFoundError):
                    found[int(path.name)] = int(path.read_text(encoding="ascii"))
        return found

    def lose(self, code: int = 15) -> None:
        """Fell off the bus: calls fail with 15, getting its handle by index fails with `code`."""
        write(self.folder / "lost", code)

    def vanish(self) -> None:
        """No longer counted: the indices of those behind it shift."""
        write(self.folder / "gone", "")

    def come_back(self) -> None:
        """After a reset or a reboot: neither lost nor gone."""
        write(self.folder / "lost", None)
        write(self.folder / "gone", None)


class NvmlBox:
    """The state directory of one simulated machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def make(cls, folder: Path, *kinds: str, driver: str = "580.159.04") -> NvmlBox:
        """A machine with these GPUs, in the order of their PCI ids; nobody may read it and engines may write."""
        box = cls(folder)
        folder.mkdir(parents=True)
        folder.chmod(0o755)
        box.set(driver_version=driver, nvml_version=f"13.{driver}", cuda_version=13000, release_ms=100, events="")
        shutil.copy(build(), folder)  # a copy, for users who cannot read where it was built
        for number, kind in enumerate(kinds):
            box._add(number, kind)
        return box

    def _add(self, number: int, kind: str) -> None:
        gpu = self.gpu(number)
        identity = {
            "uuid": f"GPU-5135c0de-{number:04x}-4000-8000-{number:012x}",
            "pci_id": f"0000:{0x1B + 0x10 * number:02x}:00.0",
            "minor_number": number,
        }
        (gpu.folder / "procs").mkdir(parents=True)
        (gpu.folder / "procs").chmod(0o777)  # engines and readers of other users change it
        gpu.set(**identity, **_COMMON, **KINDS[kind])

    @property
    def env(self) -> dict[str, str]:
        """For child processes: pynvml loads the bare soname."""
        return {"SIM_NVML": str(self.folder), "LD_LIBRARY_PATH": str(self.folder)}

    def gpu(self, number: int) -> SimGpu:
        """By folder, which is the index as long as no GPU is gone."""
        return SimGpu(self.folder / f"gpu{number}")

    def gpus(self) -> list[SimGpu]:
        return [self.gpu(number) for number in range(len(list(self.folder.glob("gpu*"))))]

    def set(self, **values: Any) -> None:
        """As SimGpu.set, for values of the machine: driver_version, nvml_version, cuda_version, release_ms."""
        for name, value in values.items():
            write(self.folder / name, value)

    def fault(self, function: str, what: int | str | None) -> None:
        """As SimGpu.fault, for a function on all GPUs or on none."""
        write(self.folder / "fault" / function, what)

    def old_driver(self) -> None:
        """No memory version 2, no recovery action."""
        self.set(driver_version="470.256.02", nvml_version="11.470.256.02", cuda_version=11040)
        for function in _NEWER_FUNCTIONS:
            self.fault(function, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        for gpu in self.gpus():
            gpu.recovery_action(None)

    def xid(self, gpu: SimGpu, xid: int, pid: int | None = None) -> None:
        """An Xid event. NVML does not tell the pid; it is in the line for readers of this file."""
        with (self.folder / "events").open("a", encoding="ascii") as events:
            events.write(f"{gpu.uuid} {xid}{'' if pid is None else f' {pid}'}\n")

    @contextlib.contextmanager
    def loaded(self) -> Iterator[ctypes.CDLL]:
        """In this process: pynvml speaks to this box, and is not initialised before or after."""
        library = ctypes.CDLL(str(build()))
        before = os.environ.get("SIM_NVML")
        os.environ["SIM_NVML"] = str(self.folder)
        _use(library)
        try:
            yield library
        finally:
            library.sim_reset()
            _use(None)
            if before is None:
                del os.environ["SIM_NVML"]
            else:
                os.environ["SIM_NVML"] = before


def _use(library: ctypes.CDLL | None) -> None:
    pynvml.nvmlLib = library
    pynvml._nvmlGetFunctionPointer_cache.clear()


def write(path: Path, value: object) -> None:
    """One value into one file, atomically; None removes it."""
    if value is None:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(f"{value}\n", encoding="ascii")
    fresh.replace(path)
