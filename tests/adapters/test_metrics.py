"""The metrics page: exact values of real pages, and that no page can hurt."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisord.core.samples import Histogram, RankMetrics
from supervisord.engine.metrics import PageMetrics, parse

DATA = Path(__file__).parent.parent / "data"


def page(name: str) -> PageMetrics:
    return parse((DATA / name).read_bytes())


def only(metrics: PageMetrics) -> RankMetrics:
    assert [rank.rank for rank in metrics.ranks] == [0]
    return metrics.ranks[0]


def rank_of(*lines: str, blocks: str = "101") -> RankMetrics:
    text = "\n".join([*lines, f'vllm:cache_config_info{{engine="0",num_gpu_blocks="{blocks}"}} 1.0'])
    return only(parse(text.encode()))


# --- pages of real engines ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "blocks", "size", "capacity"),
    [
        ("metrics/idle-cpu-0.14.1.txt", 16384, 128, None),
        ("metrics/idle-cpu-0.18.1.txt", 16384, 128, None),
        ("metrics/idle-cpu-0.24.0.txt", 16384, 128, 2_097_152),
        ("metrics/idle.txt", 16384, 128, 2_097_152),
        ("cuda-0.24/idle.txt", 83309, 16, 1_332_944),
    ],
)
def test_idle_pages(name: str, blocks: int, size: int, capacity: int | None) -> None:
    metrics = page(name)
    rank = only(metrics)
    assert (metrics.num_gpu_blocks, metrics.block_size, metrics.kv_cache_size_tokens) == (blocks, size, capacity)
    assert (rank.running, rank.waiting, rank.kv_usage, rank.awake) == (0, 0, 0.0, True)
    assert (rank.total_blocks, rank.free_blocks) == (blocks, blocks - 1)
    assert rank.preemptions == 0.0
    assert rank.draft_tokens is None
    assert rank.accepted_tokens is None


def test_page_of_0_14_1() -> None:
    rank = only(page("metrics/idle-cpu-0.14.1.txt"))
    assert rank.waiting_by_reason is None
    assert (rank.iterations, rank.prompt_tokens, rank.generation_tokens) == (8.0, 3.0, 8.0)
    assert (rank.prefix_queries, rank.prefix_hits) == (3.0, 0.0)
    assert rank.finished == {"stop": 0.0, "length": 1.0, "abort": 0.0, "error": 0.0}
    assert rank.ttft is not None
    assert rank.ttft.bounds_s[-4:] == (160.0, 640.0, 2560.0, math.inf)
    assert dict(zip(rank.ttft.bounds_s, rank.ttft.counts, strict=True))[40.0] == 1.0
    assert dict(zip(rank.ttft.bounds_s, rank.ttft.counts, strict=True))[20.0] == 0.0


def test_page_of_0_24_0_on_cuda_saturated() -> None:
    rank = only(page("cuda-0.24/saturated.txt"))
    assert (rank.running, rank.waiting) == (8, 24)
    assert rank.waiting_by_reason == {"capacity": 24, "deferred": 0}
    assert rank.kv_usage == 0.9090909090909091
    assert (rank.total_blocks, rank.free_blocks) == (320, 29)
    assert (rank.preemptions, rank.iterations) == (38.0, 2613.0)
    assert (rank.prompt_tokens, rank.generation_tokens) == (41984.0, 19184.0)
    assert (rank.prefix_queries, rank.prefix_hits) == (409600.0, 0.0)
    assert rank.finished is not None
    assert rank.finished["length"] == 73.0


def test_page_of_0_24_0_on_cuda_asleep() -> None:
    assert only(page("cuda-0.24/asleep-level1.txt")).awake is False


def test_page_of_0_24_0_on_cuda_hanging() -> None:
    rank = only(page("cuda-0.24/engine-stopped-under-load.txt"))
    assert rank.running is not None
    assert rank.running > 0
    assert rank.awake is True


def test_page_of_0_32_0_busy() -> None:
    rank = only(page("metrics/busy.txt"))
    assert (rank.running, rank.waiting, rank.iterations, rank.generation_tokens) == (16, 0, 1592.0, 22328.0)
    assert rank.ttft is not None
    assert rank.ttft.bounds_s[:6] == (0.001, 0.005, 0.01, 0.02, 0.04, 0.06)
    assert rank.ttft.counts == (0.0, 2.0, 7.0, 10.0, *(40.0,) * 19)
    assert rank.inter_token is not None
    assert rank.inter_token.counts[-1] == 22288.0


def test_page_of_0_32_0_saturated() -> None:
    rank = only(page("metrics/saturated.txt"))
    assert (rank.running, rank.waiting, rank.total_blocks, rank.free_blocks) == (20, 12, 200, 3)
    assert rank.waiting_by_reason == {"capacity": 12, "deferred": 0}
    assert rank.preemptions == 84.0


@pytest.mark.parametrize("name", sorted(path.name for path in (DATA / "metrics").glob("*.txt")))
def test_a_page_costs_little(name: str) -> None:
    """0.2 ms each on a quiet machine; 5 ms here, because the machine that runs this may be loaded."""
    body = (DATA / "metrics" / name).read_bytes()
    costs = []
    for _ in range(20):
        started = time.thread_time()
        parse(body)
        costs.append(time.thread_time() - started)
    assert min(costs) < 0.005


# --- older names ----------------------------------------------------------------------------------------------------


def test_names_of_0_9() -> None:
    rank = rank_of(
        'vllm:gpu_cache_usage_perc{engine="0",model_name="m"} 0.5',
        'vllm:gpu_prefix_cache_queries_total{engine="0",model_name="m"} 10.0',
        'vllm:gpu_prefix_cache_hits_total{engine="0",model_name="m"} 7.0',
        'vllm:time_per_output_token_seconds_bucket{engine="0",le="0.1",model_name="m"} 3.0',
        'vllm:time_per_output_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 4.0',
    )
    assert (rank.kv_usage, rank.free_blocks) == (0.5, 50)
    assert (rank.prefix_queries, rank.prefix_hits) == (10.0, 7.0)
    assert rank.inter_token == Histogram((0.1, math.inf), (3.0, 4.0))


def test_new_name_wins_over_old() -> None:
    rank = rank_of("vllm:gpu_cache_usage_perc 0.9", "vllm:kv_cache_usage_perc 0.1")
    assert rank.kv_usage == 0.1


def test_speculative_decoding() -> None:
    rank = rank_of(
        'vllm:spec_decode_num_draft_tokens_total{engine="0"} 50.0',
        'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 31.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 9.0',
    )
    assert (rank.draft_tokens, rank.accepted_tokens) == (50.0, 31.0)


def test_page_without_labels_is_rank_0() -> None:
    assert rank_of("vllm:num_requests_running 3.0").running == 3


# --- data parallelism -----------------------------------------------------------------------------------------------


def test_blocks_are_the_sum_over_the_ranks() -> None:
    config = 'block_size="16",kv_cache_size_tokens="1616",num_gpu_blocks="303"'
    text = "\n".join(
        line
        for rank, usage in ((0, 0.0), (1, 0.5), (10, 0.99))
        for line in (
            f'vllm:kv_cache_usage_perc{{engine="{rank}",model_name="m"}} {usage}',
            f'vllm:num_requests_running{{engine="{rank}",model_name="m"}} {rank}.0',
            f'vllm:cache_config_info{{engine="{rank}",{config}}} 1.0',
        )
    )
    metrics = parse(text.encode())
    assert [rank.rank for rank in metrics.ranks] == [0, 1, 10]
    assert [rank.running for rank in metrics.ranks] == [0, 1, 10]
    assert [rank.total_blocks for rank in metrics.ranks] == [101, 101, 101]
    assert [rank.free_blocks for rank in metrics.ranks] == [100, 50, 1]
    assert (metrics.num_gpu_blocks, metrics.block_size, metrics.kv_cache_size_tokens) == (303, 16, 1616)


def test_ranks_that_disagree_on_the_sum_make_it_unknown() -> None:
    metrics = parse(
        b'vllm:kv_cache_usage_perc{engine="0"} 0.0\n'
        b'vllm:cache_config_info{engine="0",num_gpu_blocks="100"} 1.0\n'
        b'vllm:cache_config_info{engine="1",num_gpu_blocks="200"} 1.0\n'
    )
    assert metrics.num_gpu_blocks is None
    assert only(metrics).free_blocks is None


# --- values that are none -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", ["NaN", "+Inf", "-Inf", "-1.0", "1e300", "None", "", "x", "1.0.0", "0x10", "\x1b[31m"]
)
def test_values_that_are_no_counts_are_unknown(value: str) -> None:
    rank = rank_of(
        f"vllm:num_requests_running {value}", f"vllm:prompt_tokens_total {value}", "vllm:num_requests_waiting 1"
    )
    assert (rank.running, rank.prompt_tokens, rank.waiting) == (None, None, 1)


@pytest.mark.parametrize("usage", ["NaN", "-0.1", "1.1", "100", "None"])
def test_usage_outside_0_to_1_is_unknown(usage: str) -> None:
    rank = rank_of(f"vllm:kv_cache_usage_perc {usage}", "vllm:num_requests_waiting 1")
    assert (rank.kv_usage, rank.free_blocks) == (None, None)
    assert rank.total_blocks == 101


@pytest.mark.parametrize("blocks", ["None", "", "NaN", "-5", "0", "1e9", "12.5", "9" * 400, "٣"])
def test_pools_that_are_no_numbers_are_unknown(blocks: str) -> None:
    rank = rank_of("vllm:kv_cache_usage_perc 0.0", blocks=blocks)
    assert (rank.total_blocks, rank.free_blocks, rank.kv_usage) == (None, None, 0.0)


def test_full_pool_and_pool_of_one_block() -> None:
    assert rank_of("vllm:kv_cache_usage_perc 1.0").free_blocks == 0
    assert rank_of("vllm:kv_cache_usage_perc 0.0", blocks="1").free_blocks == 0


def test_doubled_series_are_unknown() -> None:
    rank = rank_of(
        'vllm:num_requests_running{engine="0",model_name="a"} 1.0',
        'vllm:num_requests_running{engine="0",model_name="b"} 2.0',
        'vllm:request_success_total{engine="0",finished_reason="stop"} 1.0',
        'vllm:request_success_total{engine="0",finished_reason="stop"} 1.0',
        'vllm:request_success_total{engine="0",finished_reason="length"} 1.0',
    )
    assert rank.running is None
    assert rank.finished == {"length": 1.0}


@pytest.mark.parametrize(
    "lines",
    [
        ['le="0.1"} 1.0'],
        ['le="0.1"} 2.0', 'le="+Inf"} 1.0'],
        ['le="0.1"} NaN', 'le="+Inf"} 1.0'],
        ['le="x"} 1.0', 'le="+Inf"} 1.0'],
        ['le="NaN"} 1.0', 'le="+Inf"} 1.0'],
        ['le="+Inf"} 1.0', 'le="+Inf"} 1.0'],
    ],
)
def test_broken_histograms_are_unknown(lines: list[str]) -> None:
    rank = rank_of(*(f'vllm:time_to_first_token_seconds_bucket{{engine="0",{line}' for line in lines))
    assert rank.ttft is None


# --- hostile text ---------------------------------------------------------------------------------------------------


def test_braces_quotes_and_line_breaks_in_labels() -> None:
    rank = rank_of(
        r'vllm:num_requests_running{engine="0",model_name="a} 7 \"engine=\"9\" \n vllm:num_requests_waiting 5"} 3.0',
        'vllm:num_requests_waiting{engine="0",model_name="\x1b]0;owned\x07"} 4.0 1700000000000',
    )
    assert (rank.running, rank.waiting) == (3, 4)


@pytest.mark.parametrize("model", ["short", "x" * 5000])
def test_labels_mean_the_same_at_every_look(model: str) -> None:
    for running in (3, 4):
        line = f'vllm:num_requests_running{{engine="1",model_name="{model}"}} {running}.0\n'
        assert [(rank.rank, rank.running) for rank in parse(line.encode()).ranks] == [(1, running)]


def test_labels_that_are_no_plain_words_are_left_out() -> None:
    rank = rank_of(
        'vllm:request_success_total{engine="0",finished_reason="\x1b[2J"} 1.0',
        'vllm:request_success_total{engine="0",finished_reason="stop"} 2.0',
        'vllm:num_requests_waiting_by_reason{engine="0",reason="a b"} 2.0',
    )
    assert rank.finished == {"stop": 2.0}
    assert rank.waiting_by_reason == {}


@pytest.mark.parametrize("rank", ["-1", "x", "12345", "0\x00", "¹"])
def test_ranks_that_are_no_numbers_are_left_out(rank: str) -> None:
    assert parse(f'vllm:num_requests_running{{engine="{rank}"}} 1.0'.encode()) == PageMetrics()


def test_names_that_only_begin_alike_are_left_out() -> None:
    text = b"vllm:num_requests_running_ago 5\nxvllm:num_requests_running 5\n# vllm:num_requests_running 5\n"
    assert parse(text) == PageMetrics()


@pytest.mark.parametrize(
    "body", [b"", b"\n", b"<html>", b"\x00\xff\xfe" * 1000, b"vllm:", b"vllm:num_requests_running{"]
)
def test_pages_that_are_none(body: bytes) -> None:
    assert parse(body) == PageMetrics()


@pytest.mark.parametrize(
    "line",
    [
        b'vllm:num_requests_running{engine="0",model_name="' + b"a" * 1_000_000 + b'"} 1.0',
        b"vllm:num_requests_running{" + b"}" * 1_000_000,
        b"vllm:num_requests_running{" + b"} " * 500_000,
        b"vllm:num_requests_running{" + b"a" * 1_000_000 + b"} 1.0",
        b"vllm:num_requests_running{" + b'a="' * 300_000 + b"} 1.0",
        b"vllm:num_requests_running{" + b'a="\\' * 250_000 + b"} 1.0",
        b"vllm:num_requests_running{" + b"\\" * 1_000_000 + b'"} 1.0',
        b"vllm:num_requests_running " + b"9" * 1_000_000,
        b"\nvllm:" * 160_000,
        b"\xff" * 1_000_000,
    ],
)
def test_time_is_linear_in_the_page(line: bytes) -> None:
    """Ten lines of a megabyte; a quadratic step would take hours."""
    body = (line + b"\n") * 10 + b"vllm:num_requests_waiting 1.0\n"
    started = time.thread_time()
    metrics = parse(body)
    assert time.thread_time() - started < 5
    assert metrics.ranks[0].waiting == 1


FRAGMENTS = st.sampled_from(
    [
        *("vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:cache_config_info", "vllm:engine_sleep_state"),
        *("vllm:time_to_first_token_seconds_bucket", "vllm:request_success_total", "{", "}", '"', "\\", ",", "=", " "),
        *(
            'engine="0"',
            'engine="1"',
            'le="+Inf"',
            'le="0.5"',
            'num_gpu_blocks="100"',
            "\n",
            "1.0",
            "-1",
            "NaN",
            "1e999",
        ),
        *("\x00", "\x1b[31m", "\r", "\u2028", "é", "#", "_total", "None"),
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(FRAGMENTS, max_size=60).map("".join).map(str.encode) | st.binary(max_size=400))
def test_any_page_is_read_without_harm(body: bytes) -> None:
    metrics = parse(body)
    for rank in metrics.ranks:
        for value in (rank.running, rank.waiting, rank.kv_usage, rank.free_blocks, rank.total_blocks, rank.iterations):
            assert value is None or (math.isfinite(value) and value >= 0)
        if rank.free_blocks is not None:
            assert rank.total_blocks is not None
            assert rank.free_blocks < rank.total_blocks


# --- what is kept is bounded ----------------------------------------------------------------------------------------


def test_more_ranks_than_any_engine_has_are_passed_over() -> None:
    lines = "\n".join(f'vllm:num_requests_running{{engine="{rank}"}} {rank}' for rank in range(3000))
    found = parse(lines.encode())
    assert [rank.running for rank in found.ranks] == list(range(1024))


def test_a_histogram_of_more_buckets_than_any_has_is_unknown() -> None:
    """Histograms of five minutes are kept; one of a page of 8 MiB would take 9 MiB."""
    for count, known in ((255, True), (256, False), (9000, False)):
        name = "vllm:time_to_first_token_seconds_bucket"
        lines = [f'{name}{{engine="0",le="{bound}"}} 1' for bound in range(count)]
        found = rank_of(*lines, f'{name}{{engine="0",le="+Inf"}} 2').ttft
        assert (found is not None) is known
        assert found is None or len(found.bounds_s) == count + 1


def test_two_configurations_are_none() -> None:
    lines = [f'vllm:cache_config_info{{num_gpu_blocks="{blocks}",block_size="16"}} 1' for blocks in (10, 10, 11, 12)]
    assert parse("\n".join(lines[:2]).encode()) == PageMetrics(num_gpu_blocks=10, block_size=16)
    assert parse("\n".join(lines).encode()) == PageMetrics(block_size=16)
