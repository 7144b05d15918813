"""Running `vllm serve --help` as somebody else, bounded in every way, and taking what it prints."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from typing import Final

from supervisord.config_problems import printable
from supervisord.config_users import Account

QUIET: Final[Mapping[str, str]] = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    # Nothing is wrapped or coloured then.
    "COLUMNS": "2000",
    "NO_COLOR": "1",
}
"""No network, no GPU, no threads for each core."""

OUTPUT_MAX_BYTES: Final = 4 << 20
"""The text of 0.32 has 128 KiB."""
MEMORY_MAX_KIB: Final = 8 << 20
"""Private memory; 0.32 needs 0.5 GiB."""

_LIMITS: Final = f"ulimit -c 0; ulimit -d {MEMORY_MAX_KIB}; ulimit -f {OUTPUT_MAX_BYTES // 512}; ulimit -t $1; "
_SHELL: Final = f'{_LIMITS}shift; umask 077; exec "$@"'
_LOOK_S: Final = 0.02
_REASON_CHARS: Final = 200


class NoAnswerError(Exception):
    """Why there is no text."""


def ask(argv: tuple[str, ...], env: Mapping[str, str], who: Account, timeout_s: float) -> str:
    """Run a command as a user and give what it printed on stdout. Raises NoAnswerError."""
    deadline = time.monotonic() + timeout_s
    switch = who.uid != os.geteuid()
    # A file that has no name: bounded by the limit on files, and nobody has to read while it runs.
    out, err = os.memfd_create("help", os.MFD_CLOEXEC), os.memfd_create("complaints", os.MFD_CLOEXEC)
    try:
        try:
            child = subprocess.Popen(
                ("/bin/sh", "-c", _SHELL, "sh", str(max(1, int(timeout_s))), *argv),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd="/",
                env=env,
                start_new_session=True,
                user=who.uid if switch else None,
                group=who.gid if switch else None,
                extra_groups=sorted(who.groups) if switch else None,
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            raise NoAnswerError(f"it cannot be started ({error})") from None
        code = _wait(child, deadline)
        if code is None:
            raise NoAnswerError(f"no answer within {timeout_s:.0f} s")
        if code != 0:
            said = _content(err).strip().rpartition("\n")[2]
            detail = f": {printable(said[:_REASON_CHARS])}" if said else ""
            raise NoAnswerError(f"it {'was killed' if code < 0 else 'exited'} with {abs(code)}{detail}")
        return _content(out)
    finally:
        os.close(out)
        os.close(err)


def _wait(child: subprocess.Popen[bytes], deadline: float) -> int | None:
    """The exit code; None when the time was over. Whatever it started is ended too."""
    ended = False
    while not ended and time.monotonic() < deadline:
        # Not reaped yet: until then its number, and that of its group, belong to nobody else.
        ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
        if not ended:
            time.sleep(_LOOK_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        # One that sits in the kernel is left behind.
        child.wait(timeout=1.0)
    return child.returncode if ended else None


def _content(descriptor: int) -> str:
    size = min(os.fstat(descriptor).st_size, OUTPUT_MAX_BYTES)
    return os.pread(descriptor, size, 0).decode(errors="replace")
