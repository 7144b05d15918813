"""GPUs for people: a line each under `status`, everything under `gpu`. What is not known is a dash, never a zero."""

from __future__ import annotations

from supervisord.cli import render
from supervisord.cli.grid import UNKNOWN, Table
from supervisord.cli.render import BOLD, GREEN, RED, YELLOW, bar, cell, known, paint, shorten, wrap

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, Final

    Document = dict[str, Any]

_TABLE: Final = Table(
    {
        "index": "GPU",
        "name": "NAME",
        "health": "HEALTH",
        "membar": "MEMORY",
        "memory": "MEMORY",
        "held": "HELD BY",
        "heat": "TEMP",
        "power": "POWER",
        "busy": "BUSY",
        "persistence": "PERSISTENCE",
        "faults": "FAULTS",
    },
    (
        ("index", "name", "health", "membar", "heat", "power", "busy", "persistence", "faults", "held"),
        ("index", "name", "health", "membar", "heat", "power", "busy", "persistence", "held"),
        ("index", "name", "health", "membar", "heat", "power", "busy", "persistence"),
        ("index", "name", "health", "membar", "heat", "power", "busy"),
        ("index", "name", "health", "memory", "heat", "power", "busy"),
        ("index", "health", "memory", "heat"),
        ("index", "health"),
    ),
    {
        "memory": "memory {}",
        "heat": "{}",
        "power": "{}",
        "busy": "busy {}",
        "held": "held by {}",
        "persistence": "persistence {}",
        "faults": "faults {}",
    },
    {"membar": "memory"},
)
_NAME_MAX: Final = 16
_BAR_CELLS: Final = 10
_WIDE_BAR_CELLS: Final = 20
_LABEL: Final = 15
_STRANGE_MIN_MIB: Final = 512.0
"""Contexts and the driver itself account for less; the same bound as that of the memory gate."""
_FOREIGN_MAX: Final = 5
_SHADES: Final = {"ok": GREEN, "degraded": YELLOW, "quarantined": RED}


def health(gpu: Document, trouble: Document | None) -> str:
    """One word: quarantined, degraded, ok, or a dash while nobody can look."""
    if gpu["quarantined"]:
        return "quarantined"
    word: str = gpu["health"]
    return word if trouble is None or word != "ok" else "-"


# --- a line each ------------------------------------------------------------------------------------------------------


def table(
    gpus: list[Document], trouble: Document | None, *, width: int, colour: bool, second: bool = True
) -> Iterator[str]:
    """Lines for `status`; `trouble`: why nothing is known of GPUs now. What is wrong with them stands elsewhere."""
    rows = [_cells(gpu, trouble) for gpu in gpus]
    shades = [{"health": _SHADES[row["health"]]} if row["health"] in _SHADES else {} for row in rows]
    return _TABLE.lines(rows, shades, width=width, colour=colour, second=second)


def _cells(gpu: Document, trouble: Document | None) -> dict[str, str]:
    used, total = gpu["memory_used_mib"], gpu["memory_total_mib"]
    memory = UNKNOWN
    if used is not None:
        memory = f"{used / 1024:.1f}{'' if total is None else f'/{total / 1024:.1f}'}G"
    wanted, actual = gpu["persistence"]["wanted"], gpu["persistence"]["actual"]
    unmet = wanted in {"on", "off"} and actual not in {None, wanted}
    cells = {
        "index": known(gpu["index"]),
        "name": shorten((gpu["name"] or gpu["uuid"]).removeprefix("NVIDIA "), _NAME_MAX),
        "memory": memory,
        "membar": " ".join(filter(None, (bar(used, total, _BAR_CELLS), memory))),
        "heat": _unit(gpu["temperature_c"], "C"),
        "power": _unit(gpu["power_w"], "W"),
        "busy": _unit(gpu["utilization_percent"], "%"),
        "persistence": f"{actual} (wanted {wanted})" if unmet else known(actual),
        "faults": _faults(gpu["xids"]),
        "health": health(gpu, trouble),
        "held": _held(gpu),
    }
    return {name: cell(text) for name, text in cells.items()}


def _faults(xids: dict[str, int]) -> str:
    """By Xid, and how often."""
    names = {number: f"Xid {number}" if number.isdecimal() else "off the bus" for number in xids}
    return ", ".join(f"{names[number]}{f' x{count}' if count > 1 else ''}" for number, count in xids.items()) or UNKNOWN


def _held(gpu: Document) -> str:
    """Memory by engine, then that of everybody else; of engines that are configured for it and hold none the name."""
    processes = gpu["processes"]
    if processes is None:
        return UNKNOWN
    names = list(dict.fromkeys([*gpu["engines"], *(process["engine"] for process in processes if process["engine"])]))
    parts = []
    for name in [*names, None]:
        own = [process for process in processes if process["engine"] == name]
        size = _sum(own)
        if own or name is not None:
            parts.append(f"{name or 'not ours'} {render.gib(size)}")
    return ", ".join(parts) or "nobody"


# --- everything -------------------------------------------------------------------------------------------------------


def view(gpus: list[Document], driver: str | None, trouble: Document | None, *, width: int, colour: bool) -> str:
    """Return the whole view of `gpu`. Ends with a newline."""
    lines = list(_summary(gpus, driver, trouble, width, colour))
    for gpu in gpus:
        lines += ["", *_details(gpu, trouble, width, colour)]
    return render.joined(lines)


def _summary(
    gpus: list[Document], driver: str | None, trouble: Document | None, width: int, colour: bool
) -> Iterator[str]:
    if trouble is not None:
        yield from _trouble(trouble, width, colour)
    elif driver is None and not gpus:
        yield "no GPUs: there is no NVIDIA driver here, and no engine needs one"
    if driver is not None:
        words = [health(gpu, trouble) for gpu in gpus]
        counts = ", ".join(f"{words.count(word)} {word}" for word in _SHADES if word in words)
        worst = next((word for word in reversed(_SHADES) if word in words), "")
        many = f"{len(gpus)} GPU{'' if len(gpus) == 1 else 's'}{counts and ': '}{counts}"
        yield paint(cell(f"driver {driver}, {many}"), _SHADES.get(worst, BOLD), colour)


def _trouble(trouble: Document, width: int, colour: bool) -> Iterator[str]:
    yield paint("the GPUs cannot be seen now:", RED, colour)
    yield from wrap(f"{trouble['code']}: {trouble['message']}", width)


def _details(gpu: Document, trouble: Document | None, width: int, colour: bool) -> Iterator[str]:
    word = health(gpu, trouble)
    kind = ", ".join(filter(None, (gpu["generation"], gpu["class"])))
    head = cell(f"GPU {known(gpu['index'])}  {word}  {known(gpu['name'])}{kind and f' ({kind})'}")
    yield paint(head, _SHADES.get(word, BOLD), colour)
    yield from _reasons(gpu, width)
    load = (
        f"utilisation {_unit(gpu['utilization_percent'], '%')}, temperature {_unit(gpu['temperature_c'], ' C')}, "
        f"power {_unit(gpu['power_w'], ' W')}"
    )
    facts = {
        "memory": _memory(gpu),
        "held by": "; ".join(_holders(gpu)),
        "load": load,
        "persistence": _persistence(gpu["persistence"]),
        "Xids": ", ".join(f"{_xid(number)}: {count}" for number, count in gpu["xids"].items()),
        "engines": ", ".join(gpu["engines"]) or "none",
        "known as": f"{gpu['uuid']}, {known(gpu['pci_id'])}",
    }
    for label, text in facts.items():
        if text:
            yield from wrap(text, width, f"  {label:<{_LABEL - 2}}", " " * _LABEL)


def _reasons(gpu: Document, width: int) -> Iterator[str]:
    """What is wrong; of a quarantine also how it ends, once its cause is mended."""
    for reason in gpu["reasons"]:
        yield from wrap(f"{reason['code']}: {reason['message']}", width)
    if gpu["quarantined"]:
        yield from wrap(f"then: vllm-supervisor gpu clear {gpu['uuid']}", width)


def _memory(gpu: Document) -> str:
    used, total, free = gpu["memory_used_mib"], gpu["memory_total_mib"], gpu["memory_free_mib"]
    if used is None:
        return "-"
    picture = bar(used, total, _WIDE_BAR_CELLS)
    text = f"{used / 1024:.1f} of {'-' if total is None else f'{total / 1024:.1f}'} GiB"
    return f"{picture}{picture and ' '}{text}, {'-' if free is None else f'{free / 1024:.1f}'} free"


def _holders(gpu: Document) -> Iterator[str]:
    """Engines with the sum of their processes, processes of others, the largest first; then what no process has."""
    processes = gpu["processes"]
    if processes is None:
        yield "-"
        return
    holders: list[tuple[float | None, str]] = []
    for name in dict.fromkeys(process["engine"] for process in processes if process["engine"] is not None):
        own = [process for process in processes if process["engine"] == name]
        pids = ", ".join(str(process["pid"]) for process in own)
        holders.append((_sum(own), f"{name} {_size(_sum(own))} (pid {pids})"))
    foreign = [process for process in processes if process["engine"] is None]
    foreign.sort(key=lambda process: -(process["memory_mib"] or 0))
    for process in foreign[:_FOREIGN_MAX]:
        size, name = process["memory_mib"], process["name"] or "unknown"
        holders.append((size, f"{name} {_size(size)} (pid {process['pid']}, not ours)"))
    yield from (text for _, text in sorted(holders, key=lambda holder: -(holder[0] or 0)))
    if len(foreign) > _FOREIGN_MAX:
        yield f"{len(foreign) - _FOREIGN_MAX} more, not ours"
    held, used = _sum(processes), gpu["memory_used_mib"]
    if held is not None and used is not None and used - held >= _STRANGE_MIN_MIB:
        yield f"no process {_size(used - held)}"
    elif not processes:
        yield "nobody"


def _sum(processes: list[Document]) -> float | None:
    sizes = [process["memory_mib"] for process in processes]
    return None if None in sizes else sum(sizes)


def _persistence(mode: Document) -> str:
    """Wanted, actual, and why it is that."""
    actual, why = mode["actual"], f" ({mode['why']})" if mode["why"] else ""
    if mode["wanted"] in {None, "leave"}:
        return f"{known(actual)}{why}"
    if actual == mode["wanted"]:
        return f"{actual}, as wanted{why}"
    return f"{known(actual)}, wanted {mode['wanted']}{why}"


def _xid(number: str) -> str:
    from supervisord.core.xids import name_of  # noqa: PLC0415 - only a GPU with faults needs the words

    return name_of(int(number) if number.isdecimal() else None)


def _size(mib: float | None) -> str:
    return "- GiB" if mib is None else f"{mib / 1024:.1f} GiB"


def _unit(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.0f}{unit}"
