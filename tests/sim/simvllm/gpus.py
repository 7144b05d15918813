"""Memory on simulated GPUs (SIM_NVML, see ../nvml), taken as vLLM takes it: context, weights, profile, KV cache."""

# Importing pathlib would cost a third of the start-up time.
# ruff: noqa: PTH123

from __future__ import annotations

import contextlib
import os
import time

from .tree import say, stamp

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes
    import socket
    from collections.abc import Callable

    from .server import App

MIB = 1 << 20
GIB = 1 << 30
CONTEXT_BYTES = 512 * MIB
TOKEN_BYTES = 98304
"""KV cache of one token: 122.04 GiB held 1,332,944 tokens (tests/data/cuda-0.24)."""
# When the weights are there and when the profile is made, in parts of the loading time.
_WEIGHTS_AT = 0.4
_PROFILE_AT = 0.7
_NOT_FOUND = 6


class CannotStartError(Exception):
    """The text is the last line of vLLM's traceback."""


class Plan:
    """What every GPU of one rank is asked for."""

    def __init__(self, app: App, width: int) -> None:
        options = app.options
        self.utilization = float(options.text("gpu-memory-utilization", "0.92"))
        self.fixed_bytes = options.integer("kv-cache-memory-bytes", 0)
        self.override_blocks = options.integer("num-gpu-blocks-override", 0)
        self.block_size = app.block_size
        self.block_bytes = app.block_size * TOKEN_BYTES // width
        self.max_model_len = app.max_model_len
        self.weights_bytes = max(0, int(app.mood["gpu_mib"] * MIB) - CONTEXT_BYTES)
        self.load_s = max(0.0, app.mood["ready_delay_s"] - app.mood["imports_s"])

    def blocks(self, left_bytes: int) -> int:
        """How many blocks that are; raises if one request of full length needs more."""
        blocks = self.override_blocks or left_bytes // self.block_bytes
        tokens = blocks * self.block_size
        if tokens < self.max_model_len:
            needed = -(-self.max_model_len // self.block_size) * self.block_bytes
            raise CannotStartError(
                f"ValueError: To serve at least one request with the model's max seq len ({self.max_model_len}), "
                f"({_gib(needed)} GiB KV cache is needed, which is larger than the available KV cache memory "
                f"({_gib(left_bytes)} GiB). Based on the available memory, the estimated maximum model length is "
                f"{tokens}. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing "
                "the engine."
            )
        return blocks


class Claim:
    """What one process holds on one GPU; `on_change` tells the library."""

    def __init__(self, plan: Plan, gpus: list[str], place: int) -> None:
        if place >= len(gpus):
            raise CannotStartError(
                f"ValueError: World size ({place + 1}) is larger than the number of available GPUs ({len(gpus)}) "
                "in this node."
            )
        self._plan = plan
        self._device = f"cuda:{place}"
        self._library = _load()
        self._index = self._index_of(gpus[place])
        folder, _, _ = self._ask()
        self.path = f"{os.environ['SIM_NVML']}/gpu{folder}/procs/{os.getpid()}"
        self.held_bytes = 0
        self.on_change: Callable[[], None] = lambda: None

    def profile(self, who: str) -> int:
        """Load the model; the bytes that are left for the KV cache, as far as one can see from here."""
        plan = self._plan
        self._hold(CONTEXT_BYTES)
        _, total, free = self._ask()
        wanted = int(total * plan.utilization)
        if free < wanted and not plan.fixed_bytes:
            raise CannotStartError(
                f"ValueError: Free memory on device {self._device} ({_gib(free)}/{_gib(total)} GiB) on startup is less "
                f"than desired GPU memory utilization ({plan.utilization}, {_gib(wanted)} GiB). Decrease GPU memory "
                "utilization or reduce GPU memory used by other processes."
            )
        time.sleep(plan.load_s * _WEIGHTS_AT)
        self._hold(plan.weights_bytes)
        time.sleep(plan.load_s * (_PROFILE_AT - _WEIGHTS_AT))
        if plan.fixed_bytes:
            return plan.fixed_bytes
        # All that came meanwhile is taken for our own, also what another process took: vLLM's mistake.
        _, _, free_now = self._ask()
        left = wanted - (free - free_now)
        say(f"{who} INFO {stamp()} [gpu_worker.py:508] Available KV cache memory: {_gib(left)} GiB")
        if left <= 0:
            raise CannotStartError(
                "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
                "initializing the engine."
            )
        return left

    def take(self, kv_bytes: int) -> None:
        _, total, free = self._ask()
        if free < kv_bytes:
            raise CannotStartError(
                f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {_gib(kv_bytes)} GiB. GPU "
                f"{self._device.removeprefix('cuda:')} has a total capacity of {_gib(total)} GiB of which "
                f"{_gib(free)} GiB is free."
            )
        self._hold(kv_bytes)

    def _hold(self, more_bytes: int) -> None:
        self.held_bytes += more_bytes
        self.on_change()

    def _ask(self) -> tuple[int, int, int]:
        """Folder, total and free bytes of this GPU."""
        code, answer = _cuda_memory(self._library, self._index)
        if code:
            raise CannotStartError("RuntimeError: No CUDA GPUs are available")
        return answer

    def _index_of(self, name: str) -> int:
        """The place in the order of PCI ids of what CUDA_VISIBLE_DEVICES names."""
        if not name.isdigit():
            raise CannotStartError(f"ValueError: invalid literal for int() with base 10: '{name}'")
        if os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
            return int(name)
        order = sorted(_speeds(self._library).items(), key=lambda item: item[1], reverse=True)  # fastest first
        return order[int(name)][0] if int(name) < len(order) else int(name)


def settle(plan: Plan, claim: Claim | None, workers: list[tuple[int, socket.socket]], who: str) -> int:
    """Load the model on every GPU of this rank and take its KV cache; the number of blocks."""
    if claim:
        blocks = plan.blocks(claim.profile(who))
        claim.take(blocks * plan.block_bytes)
    else:
        answers = [sock.recv(32) for _, sock in workers]
        if not all(answers):
            raise CannotStartError(
                "Exception: WorkerProc initialization failed due to an exception in a background process."
            )
        blocks = plan.blocks(min(int(answer) for answer in answers))
        for _, sock in workers:
            sock.send(str(blocks * plan.block_bytes).encode())
    size = blocks * plan.block_size
    say(f"{who} INFO {stamp()} [kv_cache_utils.py:2327] GPU KV cache size: {size:,} tokens")
    return blocks


def settle_worker(claim: Claim, sock: socket.socket, who: str) -> None:
    """A worker's part of that; its engine core decides on the size."""
    with contextlib.suppress(OSError):  # the engine core has gone
        sock.send(str(claim.profile(who)).encode())
        if answer := sock.recv(32):
            claim.take(int(answer))


def names_gpus(app: App) -> bool:
    """Whether this engine is one that takes its memory through the simulated NVML library."""
    named = os.environ.get("SIM_NVML") and os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    return bool(named and app.mood["children"])


def _load() -> ctypes.CDLL:
    import ctypes  # noqa: PLC0415 (only engines with GPUs pay for it)

    return ctypes.CDLL(f"{os.environ['SIM_NVML']}/libnvidia-ml.so.1")


def _cuda_memory(library: ctypes.CDLL, index: int) -> tuple[int, tuple[int, int, int]]:
    import ctypes  # noqa: PLC0415

    folder, total, free = ctypes.c_int(), ctypes.c_ulonglong(), ctypes.c_ulonglong()
    code = library.sim_cuda_memory(index, ctypes.byref(folder), ctypes.byref(total), ctypes.byref(free))
    return code, (folder.value, total.value, free.value)


def _speeds(library: ctypes.CDLL) -> dict[int, tuple[float, int]]:
    """Compute capability and memory by index: what CUDA's own order goes by, more or less."""
    found: dict[int, tuple[float, int]] = {}
    while True:
        code, (folder, total, _) = _cuda_memory(library, len(found))
        if code == _NOT_FOUND:
            return found
        with open(f"{os.environ['SIM_NVML']}/gpu{folder}/compute", encoding="ascii") as file:
            found[len(found)] = (float(file.read()), total)


def _gib(number: float) -> float:
    return round(number / GIB, 2)
