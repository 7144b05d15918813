"""Every check: its name in JSON and documentation, the heading that it stands under, and the function that does it.

docs/doctor.md has a line for each (tests/adapters/test_doctor_service.py compares them). The meaning of a name stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from supervisord.doctor import driver, engines, gpus, places, rivals, running, service
from supervisord.doctor.facts import Facts
from supervisord.doctor.findings import Finding


class Check(NamedTuple):
    """One question about the machine. `ask` yields nothing where the question makes no sense."""

    name: str
    group: str
    ask: Callable[[Facts], Iterable[Finding]]


CHECKS: Final = (
    Check("driver", "NVIDIA driver", driver.loaded),
    Check("driver_versions", "NVIDIA driver", driver.versions),
    Check("nvml", "NVIDIA driver", driver.nvml),
    Check("device_files", "NVIDIA driver", driver.devices),
    Check("device_groups", "NVIDIA driver", driver.groups),
    Check("persistenced", "NVIDIA driver", driver.persistenced),
    Check("fabric_manager", "NVIDIA driver", driver.fabric),
    Check("gpus", "GPUs", gpus.present),
    Check("gpu_quarantine", "GPUs", gpus.quarantine),
    Check("gpu_memory_errors", "GPUs", gpus.memory),
    Check("gpu_recovery", "GPUs", gpus.recovery),
    Check("mig", "GPUs", gpus.mig),
    Check("persistence_mode", "GPUs", gpus.persistence_mode),
    Check("nvlink", "GPUs", gpus.nvlink),
    Check("engine_start", "engines", engines.programs),
    Check("vllm_version", "engines", engines.releases),
    Check("vllm_cuda", "engines", engines.cuda),
    Check("compiler", "engines", engines.compilers),
    Check("port", "engines", running.ports),
    Check("start_time", "engines", running.start_times),
    Check("user", "machine", places.users),
    Check("home", "machine", places.homes),
    Check("caches", "machine", places.caches),
    Check("state_dir", "machine", places.state_dir),
    Check("disk", "machine", places.disks),
    Check("shared_memory", "machine", places.shared_memory),
    Check("open_files", "machine", places.descriptors),
    Check("rival_units", "machine", rivals.units),
    Check("rival_cron", "machine", rivals.cron),
    Check("rival_supervisor", "machine", rivals.supervisors),
    Check("rival_processes", "machine", rivals.processes),
    Check("configuration", "supervisor", service.configuration),
    Check("daemon", "supervisor", service.daemon),
    Check("systemd", "supervisor", service.systemd),
    Check("unit", "supervisor", service.unit),
    Check("stop_time", "supervisor", service.stop_time),
    Check("needrestart", "supervisor", service.needrestart),
)
