"""A Prometheus, as far as a daemon can see."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from http import HTTPStatus

from tests.sim.engine import http

SCRAPE_S = 15


@contextlib.contextmanager
def scraped(port: int) -> Iterator[Counter[str]]:
    """/metrics is fetched as Prometheus does; what came of it is counted."""
    seen: Counter[str] = Counter()
    over = threading.Event()

    def scrape() -> str:
        try:
            answer = http("GET", f"http://127.0.0.1:{port}/metrics", timeout_s=10)
        except OSError as error:
            return type(error).__name__
        return "ok" if answer.status == HTTPStatus.OK and "vllm" in answer.text else f"status {answer.status}"

    def again_and_again() -> None:
        while not over.wait(SCRAPE_S):
            seen[scrape()] += 1

    thread = threading.Thread(target=again_and_again, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join(15)
