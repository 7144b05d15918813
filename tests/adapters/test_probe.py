"""One look at an engine."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from supervisord.core.model import Sample
from supervisord.core.samples import RankMetrics
from supervisord.engine.probe import EngineProbe, worst_rank
from tests.adapters.fake_http import FakeServer, Request, answer, unused_port
from tests.sim.engine import running

DATA = Path(__file__).parent.parent / "data"
BUSY = (DATA / "metrics" / "busy.txt").read_bytes()
SATURATED = (DATA / "metrics" / "saturated.txt").read_bytes()
VERSION = (DATA / "endpoints" / "busy-version.json").read_bytes()


def engine(
    health: bytes | None = answer(200), metrics: bytes | None = answer(200, BUSY), version: bytes = answer(200, VERSION)
) -> Callable[[Request], bytes | None]:
    replies = {"/health": health, "/metrics": metrics, "/version": version}
    return lambda request: replies[request.path]


@contextmanager
def probing(server: FakeServer, timeout_s: float = 10.0) -> Iterator[EngineProbe]:
    probe = EngineProbe(server.host, server.port, timeout_s)
    yield probe
    probe.close()


def look(script: Callable[[Request], bytes | None]) -> Sample:
    with FakeServer(script) as server, probing(server) as probe:
        return probe.look(1.5, None)


def test_sample_of_a_busy_engine() -> None:
    with FakeServer(engine()) as server, probing(server) as probe:
        sample = probe.look(12.5, 1 << 30)
        assert sample == Sample(
            at=12.5,
            health_status=200,
            health_error=None,
            running=16,
            waiting=0,
            total_blocks=16384,
            free_blocks=16303,
            kv_usage=0.004883110541414881,
            prompt_tokens=2098.0,
            generation_tokens=22328.0,
            iterations=1592.0,
            host_bytes=1 << 30,
            host_at=12.5,
            version="0.32.0",
            metrics_status=200,
            metrics_ok=True,
            ranks=sample.ranks,
            pool_blocks=16384,
        )
        assert sample.ranks[0].running == 16
        assert sample.ranks[0].ttft is not None


def test_sample_of_a_saturated_engine() -> None:
    sample = look(engine(metrics=answer(200, SATURATED)))
    assert (sample.running, sample.waiting, sample.total_blocks, sample.free_blocks) == (20, 12, 200, 3)
    assert sample.kv_usage == 0.9849246231155779


def test_dead_engine_core() -> None:
    sample = look(engine(health=answer(503)))
    assert (sample.health_status, sample.health_error, sample.running) == (503, None, 16)


def test_refused() -> None:
    probe = EngineProbe("127.0.0.1", unused_port(), 5)
    assert probe.look(1.0, 7) == Sample(at=1.0, health_error="refused", host_bytes=7, host_at=1.0)
    assert probe.last_page is None


def test_health_that_hangs_does_not_hide_the_metrics() -> None:
    def script(request: Request) -> bytes | None:
        if request.path == "/health":
            server.hang()
        return engine()(request)

    with FakeServer(script) as server, probing(server, timeout_s=0.3) as probe:
        sample = probe.look(1.0, None)
    assert (sample.health_status, sample.health_error, sample.running) == (None, "timeout", 16)


def test_everything_hangs() -> None:
    with FakeServer(lambda _: server.hang()) as server, probing(server, timeout_s=0.3) as probe:
        started = time.monotonic()
        assert probe.look(1.0, None) == Sample(at=1.0, health_error="timeout")
        assert time.monotonic() - started < 20


@pytest.mark.parametrize("metrics", [None, answer(404), answer(500, BUSY), answer(200, "not a page"), answer(200)])
def test_without_metrics_everything_is_unknown(metrics: bytes | None) -> None:
    sample = look(engine(metrics=metrics))
    ok = sample.metrics_ok
    status = None if metrics is None else int(metrics.split()[1])
    wanted = Sample(at=1.5, health_status=200, version=sample.version, metrics_ok=ok, metrics_status=status)
    assert sample == wanted
    assert ok == (metrics is not None and metrics.startswith(b"HTTP/1.1 200"))


def test_last_page_does_not_outlive_its_look() -> None:
    replies = iter([answer(200, BUSY), answer(500)])

    def script(request: Request) -> bytes | None:
        return next(replies) if request.path == "/metrics" else engine()(request)

    with FakeServer(script) as server, probing(server) as probe:
        probe.look(1.0, None)
        assert probe.last_page is not None
        probe.look(2.0, None)
        assert probe.last_page is None


# --- /health with JSON ----------------------------------------------------------------------------------------------


def test_block_table_stats_win() -> None:
    health = answer(200, {"status": "ok", "block_table_stats": {"free_blocks": 42}})
    sample = look(engine(health=health))
    assert (sample.free_blocks, sample.total_blocks, sample.running) == (42, 16384, 16)


def test_block_table_stats_without_metrics() -> None:
    health = answer(200, {"block_table_stats": {"free_blocks": 99, "total_blocks": 200}})
    sample = look(engine(health=health, metrics=answer(404)))
    assert (sample.free_blocks, sample.total_blocks, sample.running) == (99, 200, None)


@pytest.mark.parametrize(
    "health",
    [
        '{"block_table_stats": {"free_blocks": -1}}',
        '{"block_table_stats": {"free_blocks": true}}',
        '{"block_table_stats": {"free_blocks": 1.5}}',
        '{"block_table_stats": {"free_blocks": "7"}}',
        '{"block_table_stats": {"free_blocks": null}}',
        '{"block_table_stats": {"free_blocks": 1e999}}',
        '{"block_table_stats": {"free_blocks": ' + "9" * 5000 + "}}",
        '{"block_table_stats": [1]}',
        '{"block_table_stats": 5}',
        "[1, 2]",
        "[" * 60_000,
        "ok",
        "\xff\xfe",
    ],
)
def test_health_that_says_nothing_about_blocks(health: str) -> None:
    sample = look(engine(health=answer(200, health), metrics=answer(200, SATURATED)))
    assert (sample.health_status, sample.free_blocks) == (200, 3)


def test_block_table_stats_of_a_failing_health_do_not_count() -> None:
    health = answer(503, {"block_table_stats": {"free_blocks": 42}})
    assert look(engine(health=health, metrics=answer(200, SATURATED))).free_blocks == 3


# --- version --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [answer(200, VERSION), answer(404), answer(200, "no JSON")])
def test_version_is_asked_once(version: bytes) -> None:
    with FakeServer(engine(version=version)) as server, probing(server) as probe:
        samples = [probe.look(1.0, None) for _ in range(3)]
        assert len({sample.version for sample in samples}) == 1
        assert [request.path for request in server.requests].count("/version") == 1


def test_version_is_asked_again_after_no_answer() -> None:
    replies = iter([b"SSH-2.0-x\r\n\r\n", answer(200, VERSION)])

    def script(request: Request) -> bytes | None:
        return next(replies) if request.path == "/version" else engine()(request)

    with FakeServer(script) as server, probing(server) as probe:
        assert [probe.look(1.0, None).version for _ in range(3)] == [None, "0.32.0", "0.32.0"]


@pytest.mark.parametrize("version", ["\x1b[31m0.32.0", "", 7, None, "0" * 65])
def test_version_is_checked(version: object) -> None:
    assert look(engine(version=answer(200, json.dumps({"version": version})))).version is None


# --- several ranks --------------------------------------------------------------------------------------------------


def test_worst_rank_and_sums() -> None:
    page = "\n".join(
        [
            *(f'vllm:kv_cache_usage_perc{{engine="{rank}"}} {usage}' for rank, usage in ((0, 0.2), (1, 0.9), (2, 0.5))),
            *(f'vllm:num_requests_running{{engine="{rank}"}} {rank}' for rank in range(3)),
            *(f'vllm:generation_tokens_total{{engine="{rank}"}} {rank}00' for rank in range(3)),
            *(f'vllm:num_requests_waiting{{engine="{rank}"}} 1' for rank in range(2)),
            *(f'vllm:cache_config_info{{engine="{rank}",num_gpu_blocks="303"}} 1' for rank in range(3)),
        ]
    )
    sample = look(engine(metrics=answer(200, page)))
    assert (sample.kv_usage, sample.total_blocks, sample.free_blocks) == (0.9, 101, 10)
    assert (sample.running, sample.generation_tokens) == (3, 300.0)
    assert sample.waiting is None  # one rank did not say


def test_worst_rank_by_usage_where_the_pool_is_unknown() -> None:
    ranks = [RankMetrics(rank=0, kv_usage=0.1), RankMetrics(rank=1, kv_usage=0.8), RankMetrics(rank=2)]
    assert worst_rank(ranks) is ranks[1]
    assert worst_rank(ranks[2:]) is None
    assert worst_rank([]) is None


def test_a_look_costs_little() -> None:
    """0.6 ms for both requests and the page on a quiet machine; bound widely, the machine may be loaded."""
    with FakeServer(engine()) as server, probing(server) as probe:
        probe.look(1.0, None)
        costs = []
        for _ in range(20):
            started = time.thread_time()
            probe.look(1.0, None)
            costs.append(time.thread_time() - started)
    assert min(costs) < 0.01
    assert {request.connection for request in server.requests} == {0}


# --- a simulated engine -----------------------------------------------------------------------------------------------


def test_simulated_engine_with_two_ranks(tmp_path: Path) -> None:
    with running(tmp_path, "--data-parallel-size", "2", "--num-gpu-blocks-override", "200") as sim:
        sim.wait_ready()
        probe = EngineProbe("127.0.0.1", sim.port, 10)
        sample = probe.look(1.0, None)
        assert probe.last_page is not None
        assert [rank.rank for rank in probe.last_page.ranks] == [0, 1]
        assert (sample.health_status, sample.running, sample.total_blocks, sample.free_blocks) == (200, 0, 200, 199)
        assert sample.version == "0.32.0"
        sim.mood.set(drip={"bytes": 1, "interval_s": 0.01, "on": ["/metrics"]})
        slow = EngineProbe("127.0.0.1", sim.port, 0.5)
        started = time.monotonic()
        assert slow.look(2.0, None).running is None
        assert time.monotonic() - started < 20
        probe.close()
        slow.close()
