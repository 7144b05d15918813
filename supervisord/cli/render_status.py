"""The status document for a reader at three in the morning: what is wrong and what to do first, then everybody.

What is not known is a dash, never a zero.
"""

from __future__ import annotations

from supervisord.cli import problems, render
from supervisord.cli.grid import UNKNOWN, Table
from supervisord.cli.render import CYAN, DIM, GREEN, RED, YELLOW, age, bar, cell, clip, known, paint, wrap

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, Final

    Document = dict[str, Any]

_ALL: Final = ("name", "state", "since", "pid", "gen", "restarts", "kvbar", "requests", "rate", "ttft")
_LAYOUTS: Final = (
    (*_ALL, "gpu", "host", "warm", "hits", "model"),
    (*_ALL, "gpu", "host", "warm", "hits"),
    (*_ALL, "gpu", "host", "warm"),
    (*_ALL, "gpu", "host"),
    ("name", "state", "since", "pid", "restarts", "kvbar", "requests", "rate", "ttft", "gpu"),
    ("name", "state", "since", "kvbar", "requests", "rate", "ttft", "gpu"),
    ("name", "state", "since", "kvbar", "requests", "rate", "ttft"),
    ("name", "state", "since", "kv", "requests", "rate", "ttft"),
    ("name", "state", "since", "kv", "requests"),
    ("name", "state", "since"),
)
_TABLE: Final = Table(
    {
        "name": "ENGINE",
        "state": "STATE",
        "since": "SINCE",
        "pid": "PID",
        "gen": "GEN",
        "restarts": "RESTARTS",
        "kvbar": "KV BLOCKS",
        "kv": "KV BLOCKS",
        "requests": "RUN+WAIT",
        "rate": "TOK/S",
        "ttft": "TTFT P95",
        "gpu": "GPU MEM",
        "host": "HOST MEM",
        "warm": "WARM-UP",
        "hits": "HITS",
        "model": "MODEL",
    },
    _LAYOUTS,
    {
        "kv": "KV {}",
        "requests": "requests {}",
        "rate": "{} tokens/s",
        "ttft": "TTFT p95 {}",
        "pid": "pid {}",
        "gen": "generation {}",
        "restarts": "restarts {}",
        "gpu": "GPU {}",
        "host": "host {}",
        "warm": "warm-up {}",
        "hits": "prefix hits {}",
        "model": "{}",
    },
    {"kvbar": "kv"},
)
_SHADES: Final = {
    "ready": GREEN,
    "degraded": YELLOW,
    "stopped": DIM,
    "waiting": YELLOW,
    "backoff": RED,
    "failed": RED,
}
_WORST_FIRST: Final = (
    *("failed", "backoff", "waiting", "degraded", "stopping", "draining", "starting", "warming", "stopped"),
)
_BAR_CELLS: Final = 10
_STALE_S: Final = 60.0
_PACE_MIN_MIB: Final = 1.0
_LATELY_S: Final = 86_400.0


def view(document: Document, *, width: int, colour: bool, now: float) -> str:
    """Return the whole view; `now` is epoch seconds."""
    lines = [*top(document, width=width, colour=colour, now=now), ""]
    lines += [*tables(document, width=width, colour=colour, now=now), ""]
    return render.joined([*lines, *wrap(node(document, now), width, "", "  ")])


def top(document: Document, *, width: int, colour: bool, now: float, brief: bool = False) -> list[str]:
    """Lines of the verdict, and of what is not as it should be; `brief`: one line for each."""
    lines = list(_verdict(document, width, colour))
    wrong, under_way = problems.found(document, now)
    for title, shade, found in (("WRONG", RED, wrong), ("ON ITS WAY", CYAN, under_way)):
        if found:
            told = (f"  {clip(cell(first), width - 2)}" for first, *_ in found) if brief else _told(found, width)
            lines += ["", paint(title, shade, colour), *told]
    return lines


def tables(document: Document, *, width: int, colour: bool, now: float, second: bool = True) -> list[str]:
    """Lines of engines and GPUs; `second`: with second lines for what the width leaves out."""
    lines = list(_engines(document["engines"], width, colour, now, second=second))
    return lines if not document["gpus"] else [*lines, "", *gpus(document, width=width, colour=colour, second=second)]


def gpus(document: Document, *, width: int, colour: bool, second: bool = True) -> list[str]:
    """Lines of GPUs, if there are any."""
    from supervisord.cli import render_gpus  # noqa: PLC0415 - only machines with GPUs pay for it

    trouble = document["supervisor"]["gpu_trouble"]
    return list(render_gpus.table(document["gpus"], trouble, width=width, colour=colour, second=second))


def node(document: Document, now: float) -> str:
    """One line about the daemon and the driver."""
    daemon = document["supervisor"]
    driver = "" if daemon["driver"] is None else f", driver {daemon['driver']}"
    return cell(
        f"vllm-supervisor {daemon['version']}, pid {daemon['pid']}, up {age(daemon['since'], now)}, "
        f"launcher {daemon['launcher']}{driver}"
    )


def rest(engine: Document) -> int:
    """Engines in order of how little they need somebody."""
    return _badness(problems.state(engine))


# --- the verdict ------------------------------------------------------------------------------------------------------


def _verdict(document: Document, width: int, colour: bool) -> Iterator[str]:
    """How many are ready, and of the others how many are what, the worst first."""
    engines = document["engines"]
    wanted = [engine for engine in engines if engine["wanted"] == "running"]
    words = [problems.state(engine) for engine in wanted]
    parts = [f"{len(wanted) - len(render.unready(document))} of {len(wanted)} wanted engines ready"]
    parts += [f"{words.count(word)} {word}" for word in sorted(set(words), key=_badness) if word != "ready"]
    if len(engines) > len(wanted):
        parts.append(f"{len(engines) - len(wanted)} not wanted")
    sick = [gpu for gpu in document["gpus"] if gpu["quarantined"] or gpu["health"] != "ok"]
    found = [f"{len(sick)} of {len(document['gpus'])} GPUs not well"] if sick else []
    if problems.gpu_trouble(document) is not None:
        found.append("the GPUs cannot be seen")
    if document["supervisor"]["config_error"] is not None:
        found.append("the configuration on disk is not in force")
    worst = min((_badness(word) for word in words), default=len(_WORST_FIRST))
    if any(gpu["quarantined"] for gpu in sick):
        worst = 0
    well = worst >= len(_WORST_FIRST) and not found
    shade = RED if worst <= _WORST_FIRST.index("backoff") else GREEN if well else YELLOW
    yield from (paint(line, shade, colour) for line in wrap(", ".join([*parts, *found]), width, "", "  "))


def _badness(word: str) -> int:
    return _WORST_FIRST.index(word) if word in _WORST_FIRST else len(_WORST_FIRST)


def _told(found: list[list[str]], width: int) -> Iterator[str]:
    """In lines; the same advice is given once."""
    given = set()
    for first, *rest in found:
        yield from wrap(first, width)
        for text in rest:
            if text not in given:
                yield from wrap(text, width, "    ", "      ")
            if text.startswith(problems.DO):
                given.add(text)


# --- everybody --------------------------------------------------------------------------------------------------------


def _engines(engines: list[Document], width: int, colour: bool, now: float, *, second: bool) -> Iterator[str]:
    if not engines:
        yield "no engines are configured"
        return
    rows = [_row(engine, now) for engine in engines]
    without = () if any(engine["gpus"] for engine in engines) else ("gpu",)
    shades = [_shades(engine) for engine in engines]
    yield from _TABLE.lines(rows, shades, width=width, colour=colour, second=second, without=without)


def _row(engine: Document, now: float) -> dict[str, str]:
    kv, requests, memory = engine["kv"], engine["requests"], engine["memory"]
    free, load = _kv(kv), set(requests.values())
    cells = {
        "name": engine["name"],
        "state": problems.state(engine),
        "since": age(engine["since"], now),
        "pid": known(engine["pid"]),
        "gen": known(engine["generation"] or None),
        "restarts": _restarts(engine, now),
        "kvbar": " ".join(filter(None, (bar(usage(kv), 1.0, _BAR_CELLS), free))),
        "kv": free,
        "requests": UNKNOWN if load == {None} else f"{known(requests['running'])}+{known(requests['waiting'])}",
        "rate": UNKNOWN if engine["tokens_per_s"] is None else f"{engine['tokens_per_s']:.0f}",
        "ttft": _ttft(engine),
        "gpu": _memory(memory["gpu_mib"], memory["gpu_creep_mib_per_h"]),
        "host": _memory(memory["host_mib"], memory["host_creep_mib_per_h"]),
        "warm": _warmup(engine["warmup"]),
        "hits": UNKNOWN if engine["prefix_hit_rate"] is None else f"{engine['prefix_hit_rate']:.0%}",
        "model": engine["model"],
    }
    return {key: cell(text) for key, text in cells.items()}


def _shades(engine: Document) -> dict[str, str]:
    shades = {"state": _SHADES.get(problems.state(engine), CYAN)}
    return shades | ({"ttft": YELLOW} if _slow(engine) else {})


def usage(kv: Document) -> float | None:
    """How much of the KV cache is in use, 0 to 1."""
    share: float | None = kv["usage"]
    if share is None and kv["total_blocks"] and kv["free_blocks"] is not None:
        return float((kv["total_blocks"] - kv["free_blocks"]) / kv["total_blocks"])
    return share


def _kv(kv: Document) -> str:
    """Free of all blocks; their share where only that is known. A question mark: seen a while ago."""
    stale = "?" if kv["age_s"] is not None and kv["age_s"] > _STALE_S else ""
    if kv["free_blocks"] is not None:
        total = "" if kv["total_blocks"] is None else f"/{kv['total_blocks']}"
        return f"{kv['free_blocks']}{total} free{stale}"
    share = usage(kv)
    return UNKNOWN if share is None else f"{1 - share:.0%} free{stale}"


def _restarts(engine: Document, now: float) -> str:
    """How many, and how long ago the last failure was, for a day."""
    count, last = str(engine["restarts"]), engine["last_exit"]
    failed = engine["restarts"] > 0 and last is not None and last["class"] != "stopped"
    if not failed or now - render.epoch(last["at"]) > _LATELY_S:
        return count
    return f"{count} ({age(last['at'], now)} ago)"


def _ttft(engine: Document) -> str:
    """Against its limit, with an exclamation mark when above."""
    seen, limit = engine["ttft_p95_ms"], engine["slo"]["ttft_p95_ms"]
    if seen is None:
        return UNKNOWN
    return f"{seen:.0f}{'' if limit is None else f'/{limit:.0f}'} ms{'!' if _slow(engine) else ''}"


def _slow(engine: Document) -> bool:
    seen, limit = engine["ttft_p95_ms"], engine["slo"]["ttft_p95_ms"]
    return seen is not None and limit is not None and seen > limit


def _memory(used_mib: float | None, creep: float | None) -> str:
    """In use, and how fast it grows or shrinks."""
    if used_mib is None:
        return UNKNOWN
    pace = "" if creep is None or abs(creep) < _PACE_MIN_MIB else f" {creep:+.0f}M/h"
    return f"{render.gib(used_mib)}{pace}"


def _warmup(warmup: Document) -> str:
    """The first answer, then the settled ones."""
    first, settled = warmup["first_ms"], warmup["settled_ms"]
    if first is None and settled is None:
        return UNKNOWN
    return " > ".join("-" if ms is None else f"{ms:.0f}" for ms in (first, settled)) + " ms"
