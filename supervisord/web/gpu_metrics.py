"""The metrics of GPUs, and which engine uses which."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from supervisord.core import telemetry
from supervisord.core.model import Gpu, Node
from supervisord.web.families import Families

_MIB: Final = 1024**2


def add_gpus(families: Families, node: Node, document: Mapping[str, Any], now: float) -> None:
    """Add what is known of each GPU at `now` (monotonic)."""
    if node.telemetry.swept_at is not None:
        text = "When the GPUs were seen last, since the epoch."
        at = round(time.time() - (now - node.telemetry.swept_at), 1)
        families.gauge("gpu_last_look_timestamp_seconds", text, at)
    if node.telemetry.driver:
        families.gauge("gpu_driver_info", "The NVIDIA driver; 1.", 1, version=node.telemetry.driver)
    for gpu, seen in zip(node.gpus.values(), document["gpus"], strict=True):
        _identity(families, gpu, seen, present=gpu.absent_since is None and telemetry.trouble(node) is None)
        _values(families, seen)
        _engines(families, seen)


def _identity(families: Families, gpu: Gpu, seen: Mapping[str, Any], *, present: bool) -> None:
    families.gauge(
        "gpu_info",
        "What the GPU is; 1.",
        1,
        gpu=gpu.uuid,
        index="" if gpu.index is None else str(gpu.index),
        name=gpu.name,
        pci_id=gpu.pci_id,
        generation=gpu.generation,
    )
    families.gauge("gpu_up", "Whether it answers.", present, gpu=gpu.uuid)
    families.gauge("gpu_quarantined", "Whether no engine is started on it.", seen["quarantined"], gpu=gpu.uuid)
    for code in dict.fromkeys(reason["code"] for reason in seen["reasons"]):
        families.gauge("gpu_reason", "What is wrong with it; 1.", 1, gpu=gpu.uuid, reason=code)
    for number, count in seen["xids"].items():
        text = "Xid errors that the driver reported since the daemon started."
        families.counter("gpu_xids_total", text, count, gpu=gpu.uuid, xid=number)


def _values(families: Families, seen: Mapping[str, Any]) -> None:
    gpu, percent = seen["uuid"], seen["utilization_percent"]
    for name, text in (("total", "its memory"), ("used", "memory in use"), ("free", "memory that is free")):
        size = seen[f"memory_{name}_mib"]
        suffix = "" if name == "total" else f"_{name}"
        families.gauge(
            f"gpu_memory{suffix}_bytes", f"{text.capitalize()}.", None if size is None else size * _MIB, gpu=gpu
        )
    families.gauge("gpu_temperature_celsius", "Its temperature.", seen["temperature_c"], gpu=gpu)
    families.gauge("gpu_power_watts", "Power that it draws.", seen["power_w"], gpu=gpu)
    text = "Part of the time in which it computed."
    families.gauge("gpu_utilization_ratio", text, None if percent is None else percent / 100, gpu=gpu)
    families.counter("gpu_energy_joules_total", "Energy since the driver was loaded.", seen["energy_j"], gpu=gpu)
    persistence = seen["persistence"]
    actual = None if persistence["actual"] is None else persistence["actual"] == "on"
    families.gauge("gpu_persistence_mode", "Whether persistence mode is on.", actual, gpu=gpu)
    wanted = None if persistence["wanted"] in {None, "leave"} else persistence["wanted"] == "on"
    families.gauge("gpu_persistence_wanted", "Whether it should be; absent: it is left as it is.", wanted, gpu=gpu)


def _engines(families: Families, seen: Mapping[str, Any]) -> None:
    for engine in seen["engines"]:
        families.gauge("gpu_engine", "Which engine uses which GPU; 1.", 1, gpu=seen["uuid"], engine=engine)
    used: dict[str, float] = {}
    for process in seen["processes"] or ():
        if process["engine"] is not None and process["memory_mib"] is not None:
            used[process["engine"]] = used.get(process["engine"], 0.0) + process["memory_mib"]
    for engine, size in used.items():
        text = "Memory of an engine's processes on a GPU."
        families.gauge("gpu_engine_memory_bytes", text, size * _MIB, gpu=seen["uuid"], engine=engine)
