"""What real vLLM printed and served: tests/data, see the README there."""

# Importing pathlib would cost a third of the start-up time.
# ruff: noqa: PTH110, PTH120, PTH123

from __future__ import annotations

import contextlib
import os
import sys

from .moods import EXIT_BAD_MOOD

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def leave(code: int) -> NoReturn:
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def data_folder() -> str:
    here = os.path.dirname(os.path.realpath(__file__))
    return os.environ.get("VLLM_SIM_DATA") or os.path.normpath(f"{here}/../../data")


def read_help(data: str) -> str:
    try:
        with open(f"{data}/help-all-0.32.0.txt", encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        sys.stderr.write(f"simulated vllm: no captured help text, set VLLM_SIM_DATA: {error}\n")
        leave(EXIT_BAD_MOOD)


def read_page(data: str, name: str) -> str:
    """A captured page: `idle`, `idle-cpu-0.18.1`, `cuda-0.24/busy`."""
    for path in (f"{data}/metrics/{name}.txt", f"{data}/{name}.txt"):
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                return file.read()
    raise FileNotFoundError(f"cannot find the captured page {name!r} below {data}")


def captured_log(data: str, name: str) -> list[str]:
    """Lines of a captured start, up to the first request; `seconds` in front are dropped."""
    for path in (f"{data}/logs/{name}.stdout", f"{data}/{name}.log"):
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                text = file.read()
            break
    else:
        raise SystemExit(f"simulated vllm: cannot find the captured log {name!r} below {data}")
    lines = []
    for line in text.splitlines():
        stamped = line[:8].strip().replace(".", "").isdigit() and line[8:9] == " "
        shown = line[9:] if stamped else line
        if ' - "GET ' in shown or ' - "POST ' in shown:
            break
        lines.append(shown)
    return lines


def replay(data: str, capture: str, code: int) -> None:
    """Print a captured failure; leaves with `code` unless it is 0."""
    found = False
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        path = f"{data}/startfail/{capture}.{name}"
        if os.path.exists(path):
            found = True
            with open(path, "rb") as file:
                stream.buffer.write(file.read())
    if not found:
        sys.stderr.write(f"simulated vllm: no captured failure {capture!r} below {data}\n")
        leave(EXIT_BAD_MOOD)
    if code:
        leave(code)
