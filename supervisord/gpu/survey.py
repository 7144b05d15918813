"""One look at everything that NVML knows, by a probe of its own that is ended afterwards: for `doctor`."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Iterable
from typing import Final

from supervisord.core.gpu_samples import GpuPlace
from supervisord.gpu.client import cannot_start, popen
from supervisord.gpu.protocol import LINE_BYTES, ProtocolError, Survey, decode_survey, survey_request

BURY_S: Final = 1.0
"""What SIGKILL does not end in this time sits in the kernel, and is left behind."""
_READ_BYTES: Final = 1 << 16


class SurveyError(Exception):
    """There is no answer; the message says why. `hangs`: none in time."""

    def __init__(self, message: str, *, hangs: bool = False) -> None:
        super().__init__(message)
        self.hangs = hangs


def look(timeout_s: float, avoid: Iterable[GpuPlace] = ()) -> Survey:
    """Ask; takes `timeout_s` at most, and a second more. Raises SurveyError."""
    requests, ours = os.pipe2(os.O_CLOEXEC)
    try:
        try:
            process = popen(requests)
        finally:
            os.close(requests)
        try:
            os.write(ours, survey_request(avoid))
            line = _line_of(process, time.monotonic() + timeout_s)
        finally:
            _bury(process)
    except OSError as error:
        raise SurveyError(cannot_start(error)) from None
    finally:
        os.close(ours)
    if line is None:
        raise SurveyError(f"NVML does not answer within {timeout_s:g} s", hangs=True)
    try:
        return decode_survey(line, time.monotonic())
    except ProtocolError as error:
        raise SurveyError(f"what the GPU probe says cannot be understood: {error}") from None


def _line_of(process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
    """Its first line, or what there is of it when it ends; None: nothing in time."""
    said = b""
    out = process.stdout
    assert out is not None  # noqa: S101 (a pipe was asked for)
    poll = select.poll()
    poll.register(out, select.POLLIN)
    while b"\n" not in said and len(said) <= LINE_BYTES:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            return None
        data = os.read(out.fileno(), _READ_BYTES)
        if not data:
            break
        said += data
    return said.partition(b"\n")[0]


def _bury(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(BURY_S)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
