"""Everything that is known of one engine, for `status ENGINE`: what has no room in a table."""

from __future__ import annotations

from supervisord.cli import problems, render, render_status
from supervisord.cli.render import BOLD, age, bar, cell, duration, local, paint, wrap

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, Final

    Document = dict[str, Any]

_LABEL: Final = 15
_BAR_CELLS: Final = 20
_PACE_MIN_MIB: Final = 1.0
_MIB_PER_GIB: Final = 1024


def view(document: Document, *, width: int, colour: bool, now: float) -> str:
    """Return the whole view of a document with one engine."""
    lines = [*render_status.top(document, width=width, colour=colour, now=now), ""]
    lines += card(document["engines"][0], width=width, colour=colour, now=now)
    if document["gpus"]:
        lines += ["", *render_status.gpus(document, width=width, colour=colour)]
    return render.joined([*lines, "", *wrap(render_status.node(document, now), width, "", "  ")])


def card(engine: Document, *, width: int, colour: bool, now: float) -> Iterator[str]:
    """Lines, each with its label; what is not known is left out."""
    yield paint(cell(f"engine {engine['name']}"), BOLD, colour)
    facts = {
        "model": _joined(engine["model"], _after("vLLM ", engine["vllm_version"]), f"port {engine['port']}"),
        "GPUs": ", ".join(engine["gpus"]),
        "process": _process(engine, now),
        "last exit": _last_exit(engine["last_exit"], now),
        "KV cache": _kv(engine["kv"]),
        "requests": _requests(engine),
        "first token": _first_token(engine),
        "caches": _joined(
            _after("prefix hits ", _percent(engine["prefix_hit_rate"])),
            _after("draft tokens accepted ", _percent(engine["draft_acceptance_rate"])),
        ),
        "GPU memory": _memory(engine["memory"], "gpu"),
        "host memory": _memory(engine["memory"], "host"),
        "runs out in": _after("", engine["memory"]["exhausted_in_s"], duration),
        "warm-up": _warmup(engine["warmup"]),
        "ranks": "; ".join(map(_rank, engine["ranks"])) if len(engine["ranks"]) > 1 else "",
    }
    for label, text in facts.items():
        if text:
            yield from wrap(text, width, f"  {label:<{_LABEL - 2}}", " " * _LABEL)


def _joined(*parts: str) -> str:
    return ", ".join(filter(None, parts))


def _after(what: str, value: Any, written: Any = str) -> str:
    return "" if value is None else f"{what}{written(value)}"


def _percent(rate: float | None) -> str | None:
    return None if rate is None else f"{rate:.0%}"


def _process(engine: Document, now: float) -> str:
    ready = engine["ready_since"] if engine["state"] == "ready" else None
    return _joined(
        _after("pid ", engine["pid"]),
        f"generation {engine['generation']}" if engine["generation"] else "never started",
        f"{engine['restarts']} restart{'' if engine['restarts'] == 1 else 's'}",
        "" if ready is None else f"ready since {local(ready)} ({age(ready, now)})",
    )


def _last_exit(last: Document | None, now: float) -> str:
    if last is None:
        return ""
    when = f"{local(last['at'])} ({age(last['at'], now)} ago)"
    return f"{last['class']}, {problems.ended(last)}, generation {last['generation']}, {when}: {last['advice']}"


def _kv(kv: Document) -> str:
    free, share = kv["free_blocks"], render_status.usage(kv)
    blocks = "" if free is None else f"{free}{_after(' of ', kv['total_blocks'])} blocks free"
    used = _after("", share, "{:.0%} in use".format)
    seen = _after("seen ", kv["age_s"], "{:.0f} s ago".format)
    return " ".join(filter(None, (bar(share, 1.0, _BAR_CELLS), _joined(blocks, used, seen))))


def _requests(engine: Document) -> str:
    requests = engine["requests"]
    return _joined(
        _after("", requests["running"], "{} running".format),
        _after("", requests["waiting"], "{} waiting".format),
        _after("", engine["tokens_per_s"], "{:.1f} tokens/s".format),
    )


def _first_token(engine: Document) -> str:
    seen, limit = engine["ttft_p95_ms"], engine["slo"]["ttft_p95_ms"]
    if seen is None:
        return ""
    return f"p95 {seen:.0f} ms" + ("" if limit is None else f", limit {limit:g} ms (ttft_p95_ms)")


def _memory(memory: Document, kind: str) -> str:
    used, creep = memory[f"{kind}_mib"], memory[f"{kind}_creep_mib_per_h"]
    pace = "" if creep is None else "steady" if abs(creep) < _PACE_MIN_MIB else f"{creep:+.0f} MiB/h"
    return _joined(
        _after("", used, lambda mib: f"{mib / 1024:.1f} GiB" if mib >= _MIB_PER_GIB else f"{mib:.0f} MiB"), pace
    )


def _warmup(warmup: Document) -> str:
    return _joined(
        _after("first answer ", warmup["first_ms"], "{:.0f} ms".format),
        _after("settled ", warmup["settled_ms"], "{:.0f} ms".format),
        _after("", warmup["rounds"], "{} rounds".format),
    )


def _rank(rank: Document) -> str:
    parts = (
        _after("", rank["running"], "{} running".format),
        _after("", rank["waiting"], "{} waiting".format),
        _after("", rank["free_blocks"], "{} blocks free".format),
    )
    return f"{rank['rank']}: {_joined(*parts)}"
