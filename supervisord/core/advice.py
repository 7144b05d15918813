"""What every reason code and every class of exit means, and what to do about it: the one list that all texts use.

`status`, `why` and the runbook show these sentences; tests see to it that no code is without. `{name}` is the engine.
The command line reads this file for each `status` of an engine that is not well, so it imports nothing that costs.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Final

    Entry = tuple[str, str]
    """What it means, and what to do: both go on a line of their own, without a full stop."""

LOG: Final = "vllm-supervisor logs {name}"
RESET: Final = "vllm-supervisor reset {name}"
NOTHING: Final = "nothing: it goes on by itself"
_LEAKS: Final = "it is replaced before that memory ends; a newer vLLM may not leak"

GATES: Final[Mapping[str, Entry]] = {
    "port_held": (
        "its port has to be answered by its own processes, and somebody else has it",
        "end what holds the port, or give the engine another `port` and reload; it goes on by itself",
    ),
    "disk_full": ("too little space is free to start anything", "free some space; it goes on by itself"),
    "driver_not_ready": (
        "no process can use the NVIDIA driver now",
        "mend the driver as the reason says (nvidia-smi, dmesg); it goes on by itself",
    ),
    "gpu_missing": (
        "a GPU that it is configured for is not there, or does not answer",
        "correct `gpus` and reload, or bring the GPU back (nvidia-smi -L); it goes on by itself",
    ),
    "gpu_quarantined": (
        "a GPU that it is configured for is faulty: nothing is started there until an operator clears it",
        "mend the GPU as the reason says, then: vllm-supervisor gpu clear GPU; how it is: vllm-supervisor gpu",
    ),
    "gpu_memory_held": (
        "less GPU memory is free than it will claim",
        "end what holds the memory, or lower gpu-memory-utilization and reload; it goes on by itself",
    ),
    "gpu_busy_starting": (
        "another engine starts or stops on one of its GPUs: two at once lose KV cache, often silently",
        NOTHING,
    ),
    "max_parallel_starts": (
        "as many engines are starting as may at a time",
        f"{NOTHING}; or raise max_parallel_starts",
    ),
}
"""Why an engine waits. That costs no restart budget."""

RULES: Final[Mapping[str, Entry]] = {
    "exited": (
        "nobody asked for it, so it is a failure, whatever its code",
        f"do what the advice of its exit says; its last lines: {LOG}",
    ),
    "engine_dead": ("/health says itself that the engine died", f"see why: {LOG}"),
    "stalled": (
        "work is pending and nothing moves",
        f"see what it did last: {LOG}; raise stall_after_s if `events` says that it recovers by itself",
    ),
    "unresponsive": (
        "nothing moves and canaries fail",
        f"see what it did last: {LOG}, and the evidence file of a kill",
    ),
    "unreachable": (
        "its process lives and does not answer",
        f"see what it did last: {LOG}, and whether the machine is overloaded or swaps",
    ),
    "free_blocks": (
        "too few KV blocks are free, and it is not load",
        "a newer vLLM may not leak; lower free_blocks_min if it is too high for this pool",
    ),
    "kv_pressure": (
        "few KV blocks are free while requests run: load, not a fault",
        (
            "less load, or more cache: fewer sequences (max-num-seqs), a smaller max-model-len, an fp8 KV cache "
            "(kv-cache-dtype), another engine"
        ),
    ),
    "kv_shortfall": (
        "its KV pool is far smaller than at its last good start",
        "see what else uses its GPUs (vllm-supervisor gpu), end that, then: vllm-supervisor restart {name}",
    ),
    "gpu_creep": ("its GPU memory grows without end", _LEAKS),
    "host_creep": ("its host memory grows without end", _LEAKS),
    "garbage": (
        "it answers with nothing, or with one character over and over",
        "ask it yourself; then: vllm-supervisor restart {name}; if it comes back, the weights or their quantization",
    ),
    "slo": (
        "first tokens take longer than ttft_p95_ms",
        (
            "if requests wait, it is load: fewer sequences (max-num-seqs) or another engine; if not, "
            "enable-chunked-prefill and enable-prefix-caching"
        ),
    ),
    "gpu_idle": (
        "requests wait while its GPUs are hardly used",
        (
            "look for what holds it up: CPU or disk of the machine, a kernel that does not fit the weights (AWQ wants "
            "awq_marlin), enforce-eager, too few sequences (max-num-seqs)"
        ),
    ),
    "gpu_fault": (
        "its GPU is faulty: nothing is started there until an operator clears it (gpu clear)",
        "mend the GPU as the reason says, then: vllm-supervisor gpu clear GPU",
    ),
    "wrong_gpu": (
        "it may use only the GPUs that it is configured for",
        (
            "see that neither its [env] nor `command` sets CUDA_VISIBLE_DEVICES or CUDA_DEVICE_ORDER; what it is "
            "given: vllm-supervisor plan {name}"
        ),
    ),
    "start_timeout": (
        "a start has to make progress, and to end some time",
        f"see what it did last: {LOG}; raise start_timeout_s if it is only slow",
    ),
    "warmup_failed": (
        'its warm-up failed: with warmup.on_failure = "restart" it is started again, otherwise it serves',
        f"see why: {LOG}",
    ),
    "warmup_refused": (
        "it could not be asked for a warm-up, so its first requests will be slow",
        (
            "mend what the reason names (api_key_file, the model's route, the prime files), then: "
            "vllm-supervisor restart {name}"
        ),
    ),
    "warmup_timeout": (
        "its warm-up did not end within warmup.timeout_s: what follows is up to warmup.on_failure",
        f"see why: {LOG}; raise warmup.timeout_s if it is only slow",
    ),
    "leftover": ("what an earlier daemon left is taken over or ended, never doubled", NOTHING),
    "spawn_failed": ("it could not be started", f"mend what the reason names; then: {RESET}"),
}
"""Why an engine was ended, or is degraded."""

ASKED: Final[Mapping[str, Entry]] = {
    "operator": ("somebody asked for it", "who and when: vllm-supervisor events --engine {name}"),
    "reload": ("a reload changed how it is launched", "what it is now: vllm-supervisor plan {name}"),
    "daemon_ending": ("the daemon ended, and its engines with it", "systemctl start vllm-supervisor"),
    "stopped_outside": (
        "somebody stopped or restarted its unit",
        "when it is wanted again: vllm-supervisor start {name}",
    ),
}
"""Causes that people are, or know."""

PROGRESS: Final[Mapping[str, Entry]] = {
    "starting": ("its process runs and does not answer yet", "nothing yet: vllm-supervisor status {name} --watch"),
    "warming": ("it answers, and its warm-up is under way", "nothing yet: vllm-supervisor status {name} --watch"),
}
"""How far a start has come."""

FAILURES: Final[Mapping[str, Entry]] = {
    "config": (
        "the next start would fail like this one, so there is none",
        f"correct what the reason names, then: vllm-supervisor reload (or, if it was not the configuration: {RESET})",
    ),
    "crash_loop": (
        "more than max_restarts, and never ready with this configuration",
        f"find out why in: {LOG}; then: {RESET}",
    ),
    "unkillable": (
        "what lives on after SIGKILL is not doubled: nothing is started in its place",
        f"see where it hangs: ps -eo pid,stat,wchan:32,args; mend that or reboot, then: {RESET}",
    ),
}
"""Why an engine has failed: it stays so until somebody acts."""

_SEE_DRIVER: Final = "nvidia-smi and dmesg say more; engines that run go on"

GPUS: Final[Mapping[str, Entry]] = {
    "gpu_throttled": ("it slows itself down because of heat or power", "look at its cooling and its power supply"),
    "gpu_ecc": (
        "its memory reports errors that could not be corrected",
        "if they go on: reset it, then have it replaced; how it is: nvidia-smi -q -d ECC",
    ),
    "gpu_remap_pending": (
        "a bad row of its memory is replaced at the next reset",
        "at the next occasion stop its engines, then: vllm-supervisor gpu release, nvidia-smi --gpu-reset",
    ),
    "gpu_remap_failed": ("a bad row of its memory could not be replaced", "have the GPU replaced"),
    "gpu_recovery": ("the driver asks for a reset, a reboot or a drain of it", "do what the reason says"),
    "gpu_lost": ("it answers no more while others do", "do what the reason says, usually a reboot"),
    "gpu_released": (
        "an operator closed NVML so that a GPU can be reset",
        "when the reset is done: vllm-supervisor gpu clear GPU",
    ),
    "gpu_telemetry_unresponsive": (
        "NVML hangs: nothing is known of the GPUs, engines that run go on",
        "see dmesg for Xids and hung tasks; often only a reboot helps; it is tried again by itself",
    ),
    "gpu_probe_hangs": ("NVML did not answer in time", NOTHING),
    "gpu_first_look": ("the daemon has just started", NOTHING),
    "driver_no_permission": ("the daemon may not open the NVIDIA devices", "see: ls -l /dev/nvidia*"),
    "driver_no_gpu": ("the driver lists no GPU that answers", _SEE_DRIVER),
    "driver_not_loaded": ("the kernel module of the driver is not loaded", f"modprobe nvidia; {_SEE_DRIVER}"),
    "driver_no_library": (
        "NVML's library is not there, so nobody can look at GPUs",
        "install the driver's own tools (nvidia-smi has to work)",
    ),
    "driver_mismatch": (
        "the driver was upgraded underneath: no new process can use a GPU, those that run keep working",
        "reboot at the next occasion",
    ),
    "driver_unknown": (
        "the driver answers, but not sensibly",
        "in a container create it anew; elsewhere see nvidia-smi and dmesg",
    ),
    "driver_error": ("the driver answers with an error", _SEE_DRIVER),
}
"""What is wrong with a GPU, or with looking at them."""

REASONS: Final[Mapping[str, Entry]] = {**GATES, **RULES, **ASKED, **PROGRESS, **FAILURES, **GPUS}
"""By reason code."""

EXITS: Final[Mapping[str, tuple[str, str, str]]] = {
    "config": (
        "vLLM refuses its arguments or this model",
        "not tried again",
        f"correct what the reason names, then: vllm-supervisor reload (or, if it was not the configuration: {RESET})",
    ),
    "external": (
        "the model hub or the network failed",
        "tried again slowly, no restart budget is spent",
        "with a complete local copy of the model, HF_HUB_OFFLINE=1 avoids it",
    ),
    "resource": (
        "GPU memory, its port or a disk was taken",
        "back to the gates, no restart budget is spent",
        (
            "see who holds it: vllm-supervisor gpu, ss -ltnp, df -h; if its own use filled the GPU: fewer sequences "
            "(max-num-seqs), a smaller max-model-len or an fp8 KV cache"
        ),
    ),
    "oom_host": (
        "the kernel ended it because the memory of the machine, or its limit, ran out",
        "back-off and budget",
        "give the machine or the engine more memory; or fewer engines, a smaller cpu-offload-gb",
    ),
    "cuda_app": (
        "a CUDA kernel of its own failed",
        "back-off and budget",
        "enforce-eager, another attention backend or a newer vLLM",
    ),
    "hardware": (
        "the GPU or the driver failed",
        "back-off and budget; a GPU that the driver calls faulty is quarantined",
        "see how the GPU is and what it needs: vllm-supervisor gpu",
    ),
    "crash": ("everything else", "back-off and budget", f"see its last lines: {LOG}"),
    "stopped": ("somebody asked for it: no failure", "started again when somebody wants it", NOTHING),
}
"""By class of exit (`last_exit.class`): what it means, what follows, what to do."""


def meaning(code: str) -> str:
    """What a reason code means; empty for one of a daemon that knows more of them."""
    return REASONS.get(code, ("", ""))[0]


def to_do(code: str, name: str) -> str:
    """What to do about it, for an engine of this name; empty like its meaning."""
    return REASONS.get(code, ("", ""))[1].format(name=name)
