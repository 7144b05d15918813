"""Why a process ended: exit code, signal, kernel evidence and its last lines, in that order of trust.

The signatures are general (the wording of vLLM, PyTorch, CUDA and the kernel), learned from captured failures of real
releases; the first that matches wins, hardware before software, cause before consequence. Exit code 0 says nothing:
vLLM exits with 0 after its engine died (5 of 5, issue #48966).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from supervisord.core.model import ExitClass

ARGPARSE_ERROR: Final = 2
"""vLLM's exit code for argument errors."""

START_FAILED: Final = 1
"""And for everything else that fails at start."""

ANY: Final = frozenset(ExitClass)
OF_A_START: Final = frozenset({ExitClass.CONFIG, ExitClass.EXTERNAL})
"""Only a start fails like this."""

SIGKILL: Final = 9
SIGNAL_NAMES: Final = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE",
    9: "SIGKILL", 11: "SIGSEGV", 13: "SIGPIPE", 15: "SIGTERM",
}  # fmt: skip
"""Of Linux, those that end a process in practice; the `signal` module is more than names, so the core stays without."""

_EXCERPT_CHARS: Final = 240


@dataclass(frozen=True, slots=True)
class Signature:
    """A text that betrays a cause. `advice` may use the groups of the pattern."""

    kind: ExitClass
    pattern: re.Pattern[str]
    advice: str


def _sig(kind: ExitClass, pattern: str, advice: str) -> Signature:
    return Signature(kind, re.compile(pattern, re.IGNORECASE), advice)


_XID: Final = r"xid \(pci:[^)\n]{1,20}\): "
"""How the kernel begins an Xid line; the address may look like a number that means something else."""

SIGNATURES: Final[tuple[Signature, ...]] = (
    _sig(
        ExitClass.HARDWARE,
        r"gpu has fallen off the bus|uncorrectable ecc"
        rf"|{_XID}(?:46|48|62|64|74|79|95|110|119|120|136|140|143)\b"
        rf"|{_XID}154\b[^\n]{{0,120}}? to [^\n]{{0,40}}?(?:reset|reboot|drain)",
        "the GPU or the driver failed; look at `dmesg | grep -i xid` and `nvidia-smi -q`",
    ),
    _sig(
        ExitClass.RESOURCE,
        r"error 802: system not yet initialized",
        "the NVSwitch fabric is not up: nvidia-fabricmanager does not run, or its version is not the driver's; "
        "`systemctl status nvidia-fabricmanager`",
    ),
    _sig(
        ExitClass.RESOURCE,
        r"cuda unknown error|found no nvidia driver|no cuda gpus are available",
        "the NVIDIA driver is not ready for new processes; see `nvidia-smi`, /dev/nvidia-uvm and `dmesg`",
    ),
    _sig(
        ExitClass.CUDA_APP,
        rf"{_XID}(?:13|31|43|45|94)\b|illegal memory access|device-side assert|"
        r"cuda error: (?:an illegal|unspecified launch|misaligned)|cublas_status_",
        "a CUDA kernel failed; if it comes back, try --enforce-eager or another attention backend",
    ),
    _sig(
        ExitClass.CONFIG,
        r"unrecognized arguments: ([^\n]{1,200})",
        "this vLLM does not know {0}; remove or rename it under [engine.args] (see `vllm serve --help=all`)",
    ),
    _sig(ExitClass.CONFIG, r"error: argument ([^\n]{1,200})", "a flag has a value that vLLM refuses: {0}"),
    _sig(
        ExitClass.CONFIG,
        r"to serve at least one request with the model's max seq len[^\n]{0,400}?"
        r"estimated maximum model length is (\d+)",
        "the model does not fit: set max-model-len to at most {0}, or give it more KV cache memory",
    ),
    _sig(
        ExitClass.CONFIG,
        r"to serve at least one request with the model's max seq len|is larger than the maximum number of tokens that"
        r" can be stored in kv cache",
        "the model does not fit: lower max-model-len, or give it more KV cache memory",
    ),
    _sig(
        ExitClass.CONFIG,
        r"repo id must be in the form[^\n]{0,100}?: '([^'\n]{1,200})'",
        "there is no model directory {0}; correct `model`",
    ),
    _sig(
        ExitClass.CONFIG,
        r"outgoing traffic has been disabled|offline mode is enabled",
        "the model is not in the local cache and downloads are off; download it first, or set HF_HUB_OFFLINE=0",
    ),
    _sig(
        ExitClass.RESOURCE,
        r"address already in use",
        "the port is taken; `ss -ltnp` shows by whom",
    ),
    _sig(
        ExitClass.RESOURCE,
        r"free memory on device \S{1,40} \(([^)\n]{1,60})\)[^\n]{0,60}less than desired",
        "only {0} of GPU memory were free at the start: somebody else holds the rest (`nvidia-smi` shows who); "
        "end that, or lower gpu-memory-utilization",
    ),
    _sig(
        ExitClass.RESOURCE,
        r"no available memory for the cache blocks|cuda out of memory"
        r"|torch\.(?:cuda\.)?outofmemoryerror|cuda error: out of memory",
        "GPU memory ran out: fewer sequences (max-num-seqs), a smaller max-model-len or an fp8 KV cache; "
        "`nvidia-smi` shows who holds memory",
    ),
    _sig(
        ExitClass.RESOURCE,
        r"no space left on device|insufficient space in /dev/shm|\[errno 14\] bad address",
        "a disk or /dev/shm is full; `df -h` shows which",
    ),
    _sig(
        ExitClass.EXTERNAL,
        r"hfhubhttperror|localentrynotfounderror|too many requests|\b429\b[^\n]{0,40}(?:client error|http)"
        r"|\b50[234] (?:server error|bad gateway|gateway)"
        r"|temporary failure in name resolution|name or service not known|connectionerror|connecttimeout|readtimeout"
        r"|max retries exceeded",
        "the model hub or the network failed; with a complete local copy, HF_HUB_OFFLINE=1 avoids it",
    ),
    _sig(
        ExitClass.CONFIG,
        r"safetensorerror|headertoolarge|invalid_header|error while deserializing header",
        "a weight file of the model is damaged or incomplete; download it again",
    ),
    _sig(
        ExitClass.CONFIG,
        r"(?:modulenotfounderror|python[\d.]*): no module named '?[\w.]{1,80}|failed to find c compiler",
        "the vLLM environment is incomplete (a module or a C compiler is missing)",
    ),
    _sig(
        ExitClass.CONFIG,
        r"failed to import from vllm\.\w+: importerror\('(lib[\w.+-]{1,60})",
        "the vLLM environment needs {0}, which this machine lacks: install the system package that has it",
    ),
    _sig(
        ExitClass.CONFIG,
        # Newer releases say the same as a warning, and run.
        r"runtimeerror: (lib\w{1,60}) is not found in ld_preload",
        "this release does not run on a CPU without {0} in LD_PRELOAD; `install-vllm --print-env` prints the line for "
        "the engine's table env",
    ),
    _sig(
        ExitClass.CONFIG,
        r"validation errors? for (\w{1,60})(?:[^\x00]{0,400}?value error, ([^\n\[]{1,300}))?",
        "vLLM refuses the combination of settings ({0}): {1}",
    ),
    _sig(
        ExitClass.CONFIG,
        r"failed to load the model config|unrecognized model in|does not appear to have a file named config\.json"
        r"|are not supported for now",
        "vLLM cannot load this model; check the directory and that this vLLM version supports the architecture",
    ),
)

_UNIMPORTANT: Final = re.compile(
    r"^\s*$|HTTP/1\.[01]\" \d{3}\b|warnings\.warn|resource_tracker|nanobind|^ - (?:leaked|\.\.\. skipped)"
    r"|^\s*(?:File \"|~+\^|\^+|For further information)"
)


def classify(
    code: int | None,
    signal: int | None,
    tail: Sequence[str],
    *,
    oom_killed: bool = False,
    answered: bool = False,
) -> tuple[ExitClass, str]:
    """Class and advice for an exit that nobody asked for.

    `tail`: the last lines of stdout and stderr, oldest first. `answered`: it had come up. Only a start that failed by
    itself can have failed for its configuration or for the hub: what an engine logs later is about requests, may quote
    them, and must not keep it from being started again.
    """
    if oom_killed:
        return ExitClass.OOM_HOST, "the kernel ended it because memory ran out; give the machine or the engine more"
    text = "\n".join(tail)
    if code == ARGPARSE_ERROR and not answered:
        known = _match(text, frozenset({ExitClass.CONFIG}))
        return known or (ExitClass.CONFIG, f"vLLM refuses its arguments: {_last_line(tail)}")
    known = _match(text, ANY if code == START_FAILED and not answered else ANY - OF_A_START)
    if known is not None:
        return known
    if signal == SIGKILL:
        return (
            ExitClass.CRASH,
            "sent by the kernel (look for `Out of memory` in `dmesg`) or by somebody on this machine",
        )
    return ExitClass.CRASH, f"last line: {_last_line(tail)}"


def _match(text: str, kinds: frozenset[ExitClass]) -> tuple[ExitClass, str] | None:
    for signature in SIGNATURES:
        found = signature.pattern.search(text) if signature.kind in kinds else None
        if found is not None:
            groups = [" ".join((group or "see the log").split()) for group in found.groups()]
            return signature.kind, signature.advice.format(*groups)
    return None


def _last_line(tail: Sequence[str]) -> str:
    for line in reversed(tail):
        if not _UNIMPORTANT.search(line):
            return line.strip()[:_EXCERPT_CHARS]
    return "(nothing that says why)" if any(line.strip() for line in tail) else "(no output)"
