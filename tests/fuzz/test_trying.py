"""The bounds that every target is tried within: what breaks one of them is caught."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.fuzz.trying import TRIED, bounded


@pytest.fixture(autouse=True)
def uncounted() -> Iterator[None]:
    yield
    TRIED.pop("it", None)


def _take(mib: int) -> None:
    assert b"x" * (mib << 20)


def test_a_moment_of_memory_is_caught_also_below_an_earlier_peak() -> None:
    _take(300)
    with bounded("it", b""):
        _take(20)
    with pytest.raises(AssertionError, match=r"(199|200) MiB for 0 bytes"), bounded("it", b"", start_s=10.0):
        _take(200)


def test_waiting_for_ever_is_caught_and_its_place_told(capfd: pytest.CaptureFixture[str]) -> None:
    lock = threading.Lock()
    lock.acquire()

    def wait() -> None:
        try:
            lock.acquire()
        except Exception:  # noqa: BLE001 (as a target may)
            return

    said = r"it: _HangError: no end after 0\.5 s"
    with pytest.raises(AssertionError, match=said), bounded("it", b"", wait_s=0.25):
        wait()
    told = capfd.readouterr().err
    assert "in wait" in told
    assert "test_trying.py" in told


def _work() -> None:
    end = time.thread_time() + 0.5
    while time.thread_time() < end:
        pass


def _in_a_thread() -> None:
    thread = threading.Thread(target=_work)
    thread.start()
    thread.join()


def _in_a_child() -> None:
    code = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run((sys.executable, "-ISc", code), check=True)


@pytest.mark.parametrize("work", [_work, _in_a_thread, _in_a_child])
def test_work_is_caught_wherever_it_is_done(work: Callable[[], None]) -> None:
    with pytest.raises(AssertionError, match=r"it: \d\.\d\d s of CPU"), bounded("it", b""):
        work()


def test_small_work_is_counted() -> None:
    for data in (b"", "four", [1, 2]):
        with bounded("it", data, start_s=10.0):
            pass
    assert TRIED["it"][:2] == [3, 10]
