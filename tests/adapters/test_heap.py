"""Memory of threads, as glibc itself counts it."""

from __future__ import annotations

import subprocess
import sys

import pytest

_THREADS = """
import ctypes, threading
from supervisord import heap
{first}
libc = ctypes.CDLL(None)
both = threading.Barrier(9)
def allocate():
    libc.malloc(5000)
    both.wait()
for _ in range(8):
    threading.Thread(target=allocate).start()
both.wait()
libc.malloc_stats()
"""


@pytest.mark.parametrize(("first", "shared"), [("heap.share_one_arena()", True), ("", False)])
def test_all_threads_allocate_from_one_arena(first: str, shared: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _THREADS.format(first=first)], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stderr.count("Arena ") == 1) is shared


def test_a_libc_without_arenas_is_no_trouble() -> None:
    code = "import ctypes; from supervisord import heap; ctypes.CDLL = lambda name: object(); heap.share_one_arena()"
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
