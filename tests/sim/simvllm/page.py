"""The metrics page: a captured idle page whose engine series are alive."""

from __future__ import annotations

import bisect
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_ALIASES = {  # names of older releases
    "vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "vllm:time_per_output_token_seconds": "vllm:inter_token_latency_seconds",
}
SIMPLE = (
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:num_requests_waiting_by_reason|capacity", "vllm:num_requests_waiting_by_reason|deferred",
    "vllm:engine_sleep_state|awake", "vllm:engine_sleep_state|weights_offloaded",
    "vllm:engine_sleep_state|discard_all", "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total", "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_by_source_total|local_compute",
    "vllm:prompt_tokens_by_source_total|local_cache_hit", "vllm:prompt_tokens_cached_total",
    "vllm:generation_tokens_total", "vllm:request_success_total|stop",
    "vllm:request_success_total|length", "vllm:request_success_total|abort",
    "vllm:request_success_total|error",
)  # fmt: skip
HISTOGRAMS = (
    "vllm:request_prompt_tokens", "vllm:request_generation_tokens", "vllm:iteration_tokens_total",
    "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds", "vllm:request_queue_time_seconds",
    "vllm:request_inference_time_seconds", "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds", "vllm:request_time_per_output_token_seconds",
    "vllm:request_params_max_tokens",
)  # fmt: skip


class Histogram:
    """Counts per bucket; the bounds come from the template when the page is first asked for."""

    __slots__ = ("_values", "bounds", "count", "counts", "total")

    def __init__(self) -> None:
        self.bounds: list[float] = []
        self.counts: list[int] = []
        self.count = 0
        self.total = 0.0
        self._values: list[float] | None = []

    def observe(self, value: float) -> None:
        self.count += 1
        self.total += value
        if self._values is not None:
            self._values.append(value)
        else:
            self.counts[bisect.bisect_left(self.bounds, value)] += 1

    def set_bounds(self, bounds: list[float]) -> None:
        values, self._values = self._values or [], None
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        for value in values:
            self.counts[bisect.bisect_left(bounds, value)] += 1

    def upto(self, bound: float) -> float:
        return float(sum(self.counts[: bisect.bisect_left(self.bounds, bound) + 1]))


class RankStats:
    """The live numbers of one engine rank."""

    def __init__(self) -> None:
        self.simple = dict.fromkeys(SIMPLE, 0.0)
        self.simple["vllm:engine_sleep_state|awake"] = 1.0
        self.histograms = {name: Histogram() for name in HISTOGRAMS}

    def add(self, name: str, amount: float = 1.0) -> None:
        self.simple[name] += amount


class Page:
    """Renders the template with the numbers of every rank."""

    def __init__(self, template: str, model: str, ranks: list[RankStats]) -> None:
        self.ranks = ranks
        self._parts: list[str | tuple[str, str, float, int]] = []
        self._config = "num_gpu_blocks", "block_size"
        bounds: dict[str, list[float]] = {}
        for line in template.splitlines():
            named = line.replace('model_name="tiny"', f'model_name="{model}"')
            self._compile(named, bounds)
        for rank in ranks:
            for name, histogram in rank.histograms.items():
                histogram.set_bounds(bounds.get(name, []))

    def _compile(self, line: str, bounds: dict[str, list[float]]) -> None:
        if not line.startswith("vllm:") or 'engine="0"' not in line:
            self._parts.append(line + "\n")
            return
        head, _, _ = line.rpartition(" ")
        key, bound = _key(head)
        base = key.rpartition("_")[0] if key.endswith(("_bucket", "_count", "_sum")) else key
        if key.endswith("_bucket") and base in HISTOGRAMS and bound != float("inf"):
            known = bounds.setdefault(base, [])
            known.append(bound)
        for number in range(len(self.ranks)):
            engine = head.replace('engine="0"', f'engine="{number}"')
            if key in SIMPLE or base in HISTOGRAMS or key == "vllm:cache_config_info":
                self._parts.append((engine + " ", key, bound, number))
            else:
                self._parts.append(line.replace('engine="0"', f'engine="{number}"') + "\n")

    def render(self, blocks: str, block_size: int, with_vllm: bool) -> str:
        out: list[str] = []
        for part in self._parts:
            if isinstance(part, str):
                if with_vllm or "vllm:" not in part:
                    out.append(part)
            elif with_vllm:
                head, key, bound, number = part
                if key == "vllm:cache_config_info":
                    out.append(_config_line(head, blocks, block_size))
                else:
                    out.append(f"{head}{self._value(key, bound, number)!r}\n")
        return "".join(out)

    def _value(self, key: str, bound: float, number: int) -> float:
        rank = self.ranks[number]
        if key in rank.simple:
            return rank.simple[key]
        base, _, what = key.rpartition("_")
        histogram = rank.histograms[base]
        if what == "sum":
            return histogram.total
        return float(histogram.count) if what == "count" else histogram.upto(bound)


def _key(head: str) -> tuple[str, float]:
    """The series behind `name{labels}`: its name, plus the one label that tells it apart."""
    name, _, labels = head.partition("{")
    name = _ALIASES.get(name, name)
    for old, new in _ALIASES.items():
        if name.startswith(old + "_"):
            name = new + name[len(old) :]
    bound = float("inf")
    if name == "vllm:cache_config_info":
        return name, bound
    for label in labels.rstrip("}").split(","):
        key, _, value = label.partition("=")
        if key == "le":
            bound = float(value.strip('"'))
        elif key not in ("engine", "model_name", ""):
            name += "|" + value.strip('"')
    return name, bound


def _config_line(head: str, blocks: str, block_size: int) -> str:
    line = _set_label(_set_label(head, "num_gpu_blocks", blocks), "block_size", str(block_size))
    if blocks.isdigit():
        line = _set_label(line, "kv_cache_size_tokens", str(int(blocks) * block_size))
    return line + "1.0\n"


def _set_label(line: str, name: str, value: str) -> str:
    for before in ("{", ","):
        start = line.find(f'{before}{name}="')
        if start >= 0:
            begin = start + len(name) + 3
            return line[:begin] + value + line[line.index('"', begin) :]
    return line


def override(text: str, mood: dict[str, Any], model: str, since: float) -> str:
    """Apply gauges, counters, rates, rename and drop of the mood to a rendered page."""
    lines = text.splitlines()
    fixed = {**mood["gauges"], **mood["counters"]}
    for series, value in fixed.items():
        _replace(lines, series, model, lambda _, value=value: float(value))
    passed = time.monotonic() - since
    for series, rate in mood["rates"].items():
        _replace(lines, series, model, lambda old, rate=rate: old + rate * passed)
    dropped = tuple(mood["drop"])
    if dropped:
        lines = [line for line in lines if _name(line) not in dropped]
    for old, new in mood["rename"].items():
        lines = [line.replace(old, new, 1) if _name(line).startswith(old) else line for line in lines]
    return "\n".join(lines) + "\n"


def _name(line: str) -> str:
    words = line.split(" ")
    return words[2] if line.startswith("#") and len(words) > 2 else words[0].partition("{")[0]


def _replace(lines: list[str], series: str, model: str, value: Any) -> None:
    name, _, labels = series.partition("{")
    wanted = [label for label in labels.rstrip("}").split(",") if label]
    found = False
    for number, line in enumerate(lines):
        if line.startswith((name + "{", name + " ")) and all(label in line for label in wanted):
            head, _, old = line.rpartition(" ")
            lines[number] = f"{head} {value(float(old))!r}"
            found = True
    if not found:
        head = series if wanted else f'{name}{{engine="0",model_name="{model}"}}'
        lines.append(f"{head} {value(0.0)!r}")


def garbage(kind: Any, text: str) -> bytes:
    """Pages that no parser should believe."""
    if kind == "html":
        return b"<html><head><title>502 Bad Gateway</title></head><body>nginx</body></html>\n"
    if kind == "truncated":
        at = text.find("vllm:kv_cache_usage_perc{")
        return text[: at + 30].encode()
    if kind == "control":
        return text.replace('model_name="', 'model_name="\x1b[31m\x07\u202e').encode()
    if kind == "nan":
        lines = (line.rpartition(" ")[0] + " NaN" if line.startswith("vllm:") else line for line in text.splitlines())
        return ("\n".join(lines) + "\n").encode()
    return bytes(range(256)) * 64
