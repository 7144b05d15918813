"""GPUs for people: a line each under `status`, everything under `gpu`. What is not known is a dash, never a zero."""

from __future__ import annotations

from supervisord.cli.render import BOLD, GREEN, RED, YELLOW, clean, known, paint, shorten, wrap

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, Final

    Document = dict[str, Any]

_LAYOUTS: Final = (
    ("GPU", "NAME", "BAR", "TEMP", "POWER", "BUSY", "HEALTH", "ENGINES"),
    ("GPU", "NAME", "BAR", "TEMP", "POWER", "BUSY", "HEALTH"),
    ("GPU", "NAME", "MEMORY", "TEMP", "POWER", "BUSY", "HEALTH"),
    ("GPU", "MEMORY", "TEMP", "HEALTH"),
    ("GPU", "HEALTH"),
)
"""Columns, for the widest terminal first. BAR is MEMORY with a picture."""
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


def table(gpus: list[Document], trouble: Document | None, *, width: int, colour: bool) -> Iterator[str]:
    """Lines for `status`; `trouble`: why nothing is known of GPUs now."""
    if trouble is not None:
        yield from _trouble(trouble, width, colour)
    if not gpus:
        return
    cells = [_cells(gpu, trouble) for gpu in gpus]
    for layout in _LAYOUTS:
        widths = [max(len(_header(name)), *(len(row[name]) for row in cells)) for name in layout]
        if sum(widths) + 2 * (len(widths) - 1) <= width:
            break
    yield paint("  ".join(_header(name).ljust(room) for name, room in zip(layout, widths, strict=True)), BOLD, colour)
    for gpu, row in zip(gpus, cells, strict=True):
        shade = _SHADES.get(row["HEALTH"], "")
        texts = {name: row[name].ljust(room) for name, room in zip(layout, widths, strict=True)}
        texts["HEALTH"] = paint(texts["HEALTH"], shade, colour and bool(shade))
        yield "  ".join(texts[name] for name in layout)
        yield from _reasons(gpu, width)


def _header(name: str) -> str:
    return "MEMORY" if name == "BAR" else name


def _cells(gpu: Document, trouble: Document | None) -> dict[str, str]:
    used, total = gpu["memory_used_mib"], gpu["memory_total_mib"]
    memory = "-"
    if used is not None:
        memory = f"{used / 1024:.1f}{'' if total is None else f'/{total / 1024:.1f}'}G"
    cells = {
        "GPU": known(gpu["index"]),
        "NAME": shorten((gpu["name"] or gpu["uuid"]).removeprefix("NVIDIA "), _NAME_MAX),
        "MEMORY": memory,
        "BAR": " ".join(filter(None, (_bar(used, total, _BAR_CELLS), memory))),
        "TEMP": _unit(gpu["temperature_c"], "C"),
        "POWER": _unit(gpu["power_w"], "W"),
        "BUSY": _unit(gpu["utilization_percent"], "%"),
        "HEALTH": health(gpu, trouble),
        "ENGINES": ", ".join(gpu["engines"]) or "-",
    }
    return {name: clean(cell) for name, cell in cells.items()}


# --- everything -------------------------------------------------------------------------------------------------------


def view(gpus: list[Document], driver: str | None, trouble: Document | None, *, width: int, colour: bool) -> str:
    """Return the whole view of `gpu`. Ends with a newline."""
    lines = list(_summary(gpus, driver, trouble, width, colour))
    for gpu in gpus:
        lines += ["", *_details(gpu, trouble, width, colour)]
    return "".join(f"{line.rstrip()}\n" for line in lines)


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
        yield paint(clean(f"driver {driver}, {many}"), _SHADES.get(worst, BOLD), colour)


def _trouble(trouble: Document, width: int, colour: bool) -> Iterator[str]:
    yield paint("the GPUs cannot be seen now:", RED, colour)
    yield from wrap(f"{trouble['code']}: {trouble['message']}", width)


def _details(gpu: Document, trouble: Document | None, width: int, colour: bool) -> Iterator[str]:
    word = health(gpu, trouble)
    kind = ", ".join(filter(None, (gpu["generation"], gpu["class"])))
    head = clean(f"GPU {known(gpu['index'])}  {word}  {known(gpu['name'])}{kind and f' ({kind})'}")
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
    bar = _bar(used, total, _WIDE_BAR_CELLS)
    text = f"{used / 1024:.1f} of {'-' if total is None else f'{total / 1024:.1f}'} GiB"
    return f"{bar}{bar and ' '}{text}, {'-' if free is None else f'{free / 1024:.1f}'} free"


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


def _bar(used: float | None, total: float | None, cells: int) -> str:
    if used is None or not total:
        return ""
    full = max(0, min(cells, round(cells * used / total)))
    return f"[{'#' * full}{'.' * (cells - full)}]"


def _size(mib: float | None) -> str:
    return "- GiB" if mib is None else f"{mib / 1024:.1f} GiB"


def _unit(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.0f}{unit}"
