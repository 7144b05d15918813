"""What rules mean and what to do, in words: the fixed sentences of a story. `{name}` is the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

RULES: Final[Mapping[str, str]] = {
    "exited": "nobody asked for it, so it is a failure, whatever its code",
    "engine_dead": "/health says itself that the engine died",
    "stalled": "work is pending and nothing moves",
    "unresponsive": "nothing moves and canaries fail",
    "unreachable": "its process lives and does not answer",
    "free_blocks": "too few KV blocks are free, and it is not load",
    "gpu_creep": "its GPU memory grows without end",
    "host_creep": "its host memory grows without end",
    "kv_shortfall": "its KV pool is far smaller than at its last good start",
    "gpu_fault": "its GPU is faulty: nothing is started there until an operator clears it (gpu clear)",
    "wrong_gpu": "it may use only the GPUs that it is configured for",
    "start_timeout": "a start has to make progress, and to end some time",
    "warmup_failed": "warmup.on_failure is restart, and the warm-up failed",
    "warmup_timeout": "warmup.on_failure is restart, and the warm-up did not end",
    "port_held": "its port has to be answered by its own processes",
    "spawn_failed": "it could not be started",
    "operator": "no rule, somebody asked for it",
    "reload": "no rule, a reload changed how it is launched",
    "daemon_ending": "no rule, the daemon ended, and its engines with it",
    "stopped_outside": "no rule, somebody stopped its unit",
    "leftover": "what an earlier daemon left is taken over or ended, never doubled",
    "config": "the next start would fail like this one, so there is none",
    "crash_loop": "more than max_restarts, and never ready with this configuration",
    "unkillable": "what lives on after SIGKILL is not doubled: nothing is started in its place",
}
UNKNOWN: Final = "see the event"
ASKED: Final = frozenset({"operator", "reload", "daemon_ending", "stopped_outside"})
"""Causes that people are, or know."""

GATE: Final = "a closed gate: it waits, which costs no restart budget, and looks again by itself"

CLASSES: Final[Mapping[str, str]] = {
    "resource": "resource: back to the gates, no restart budget is spent",
    "external": "external: tried again slowly, no restart budget is spent",
}
COUNTED: Final = "{kind}: back-off and budget"
"""Every other class of an exit."""

LOG: Final = "vllm-supervisor logs {name}"
RESET: Final = "vllm-supervisor reset {name}"

FAILED: Final[Mapping[str, str]] = {
    "config": f"correct what SEEN says, then: vllm-supervisor reload (or, if it was not the configuration: {RESET})",
    "crash_loop": f"find out why in: {LOG}; then: {RESET}",
    "unkillable": f"see where it hangs: ps -eo pid,stat,wchan:32,args; mend that or reboot, then: {RESET}",
}
GATES: Final[Mapping[str, str]] = {
    "port_held": "end what holds the port, or give the engine another `port` and reload; it goes on by itself",
    "gpu_memory_held": "end what holds the memory, or lower gpu-memory-utilization and reload; it goes on by itself",
    "disk_full": "free some space; it goes on by itself",
    "driver_not_ready": "what NOW says (more in: nvidia-smi, dmesg); it goes on by itself",
    "gpu_missing": "correct `gpus` and reload, or bring the GPU back (nvidia-smi -L); it goes on by itself",
    "gpu_quarantined": "mend it as NOW says, then: vllm-supervisor gpu clear GPU; how it is: vllm-supervisor gpu",
}
WAIT: Final = "nothing: it goes on by itself"
FOLLOW: Final = "nothing yet: vllm-supervisor status {name} --watch"
BACKOFF: Final = f"nothing yet, it is started again by itself; what it said: {LOG}"
START: Final = "when it is wanted again: vllm-supervisor start {name}"
HELD: Final = "back into traffic: vllm-supervisor start {name}"
DEGRADED: Final = f"it serves, but NOW says what is wrong; its log: {LOG}"
OF_GPUS: Final = frozenset(
    {
        *("gpu_throttled", "gpu_ecc", "gpu_remap_pending", "gpu_released", "gpu_telemetry_unresponsive", "gpu_idle"),
        *("driver_no_permission", "driver_not_loaded", "driver_no_library", "driver_mismatch", "driver_unknown"),
        *("driver_no_gpu", "driver_error"),
    }
)
"""Reasons of `degraded` that lie in its GPUs, not in the engine."""
DEGRADED_GPUS: Final = "it serves, but NOW says what is wrong with its GPUs: vllm-supervisor gpu"
EVIDENCE: Final = "; evidence, in the state directory: {file}"
WELL: Final = "nothing"
AGAIN: Final = f"nothing; if it happens again: {LOG}"
SLOW_START: Final = f"nothing; if it happens again: {LOG}, and raise start_timeout_s if it is only slow"
STATES: Final[Mapping[str, str]] = {"backoff": "it will be started again", "waiting": "it waits"}
"""Where "it is" does not fit in front of a state."""
GONE: Final = "nothing: it is not configured any more"
