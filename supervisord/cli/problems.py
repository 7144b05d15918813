"""What is wrong on a node, the worst first, and what is on its way: for each a first line and what belongs to it."""

from __future__ import annotations

import contextlib
import signal

from supervisord.cli.render import age, duration, epoch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, Final

    Document = dict[str, Any]
    Problem = list[str]

DO: Final = "do: "
"""Begins what to do."""
_ON_ITS_WAY: Final = frozenset({"starting", "warming", "draining", "stopping"})
_STUCK: Final = frozenset({"failed", "backoff", "waiting"})
_QUIET_GATES: Final = frozenset({"max_parallel_starts", "gpu_busy_starting"})
"""Gates that the node's own work closes."""
_QUARANTINED: Final = " is quarantined: "
_FAILED, _OF_THE_NODE, _NOT_READY, _DEGRADED = range(4)


def found(document: Document, now: float) -> tuple[list[Problem], list[Problem]]:
    """Return both lists; `now` is epoch seconds."""
    wrong: list[tuple[int, Problem]] = [(_OF_THE_NODE, told) for told in _of_the_node(document)]
    sick = [gpu for gpu in document["gpus"] if gpu["reasons"] or gpu["quarantined"]]
    wrong += [(_OF_THE_NODE if gpu["quarantined"] else _DEGRADED, _of_gpu(gpu)) for gpu in sick]
    under_way: list[Problem] = []
    quarantined = [gpu["uuid"] for gpu in document["gpus"] if gpu["quarantined"]]
    for engine in document["engines"]:
        told = _of_engine(engine, quarantined, now)
        codes = {reason["code"] for reason in engine["reasons"]}
        if engine["state"] in _ON_ITS_WAY or (engine["state"] == "waiting" and codes <= _QUIET_GATES):
            under_way.append(told)
        elif engine["state"] in _STUCK:
            wrong.append((_FAILED if engine["state"] == "failed" else _NOT_READY, told))
        elif engine["health"] == "degraded":
            wrong.append((_DEGRADED, told))
    wrong.sort(key=lambda one: one[0])
    return [told for _, told in wrong], under_way


def state(engine: Document) -> str:
    """One word: the state, or that it is ready and not well."""
    word: str = engine["state"]
    return "degraded" if engine["health"] == "degraded" else word


def gpu_trouble(document: Document) -> Document | None:
    """Why nobody sees the GPUs, where an engine needs one."""
    trouble: Document | None = document["supervisor"]["gpu_trouble"]
    return trouble if any(engine["gpus"] for engine in document["engines"]) else None


def ended(last: Document) -> str:
    """How a process ended."""
    number = last["signal"]
    if number is None:
        return f"exit code {'unknown' if last['code'] is None else last['code']}"
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _of_the_node(document: Document) -> Iterator[Problem]:
    error, trouble = document["supervisor"]["config_error"], gpu_trouble(document)
    if error is not None:
        yield [f"the configuration on disk is not in force: {error}", f"{DO}correct it, then: vllm-supervisor reload"]
    if trouble is not None:
        yield [f"the GPUs cannot be seen now: {_reason(trouble)}", *_do(trouble["code"], "")]


def _of_gpu(gpu: Document) -> Problem:
    """Of a quarantine also how it ends, once its cause is mended."""
    label = gpu["uuid"] if gpu["index"] is None else f"GPU {gpu['index']}"
    lines = _headed(f"{label}: {'quarantined' if gpu['quarantined'] else 'degraded'}", map(_reason, gpu["reasons"]))
    if gpu["quarantined"]:
        return [*lines, f"then: vllm-supervisor gpu clear {gpu['uuid']}"]
    return [*lines, *(text for reason in gpu["reasons"] for text in _do(reason["code"], ""))]


def _of_engine(engine: Document, quarantined: list[str], now: float) -> Problem:
    """Where an engine is and since when; why; how it ended last; what to do."""
    head = f"{engine['name']}: {engine['state']} for {age(engine['since'], now)}"
    if engine["health"] == "degraded":
        head += ", degraded"
    if engine["next_start_at"] is not None:
        what = "looked at again" if engine["state"] == "waiting" else "started again"
        head += f", {what} in {duration(epoch(engine['next_start_at']) - now)}"
    lines = _headed(head, _why(engine, quarantined))
    last = engine["last_exit"]
    if last is not None and engine["state"] != "ready" and last["class"] != "stopped":
        said = any(last["advice"] in reason["message"] for reason in engine["reasons"])
        how = f"{last['class']}, {ended(last)}, generation {last['generation']}, {age(last['at'], now)} ago"
        lines.append(f"last exit: {how}" + ("" if said else f": {last['advice']}"))
    if engine["state"] not in _ON_ITS_WAY:
        untold = [reason for reason in engine["reasons"] if not _said_there(reason, quarantined)]
        lines += [text for reason in untold for text in _do(reason["code"], engine["name"], last)]
    return lines


def _why(engine: Document, quarantined: list[str]) -> Iterator[str]:
    """Its reasons; a code that is the state itself says nothing new. Of `quarantined` GPUs all is said elsewhere."""
    for reason in engine["reasons"]:
        if _said_there(reason, quarantined):
            gpu = reason["message"].partition(_QUARANTINED)[0]
            yield f"gpu_quarantined: {gpu} is quarantined, see there"
        else:
            yield reason["message"] if reason["code"] == engine["state"] else _reason(reason)


def _said_there(reason: Document, quarantined: list[str]) -> bool:
    gpu, parted, _ = reason["message"].partition(_QUARANTINED)
    return reason["code"] == "gpu_quarantined" and bool(parted) and any(uuid in gpu for uuid in quarantined)


def _headed(head: str, reasons: Iterator[str]) -> Problem:
    """A single reason stands on the line of the head."""
    told = list(reasons)
    return [f"{head}: {told[0]}"] if len(told) == 1 else [head, *told]


def _reason(reason: Document) -> str:
    return f"{reason['code']}: {reason['message']}"


def _do(code: str, name: str, last: Document | None = None) -> Iterator[str]:
    from supervisord.core import advice  # noqa: PLC0415 - only when something is not well

    text = advice.to_do(code, name)
    if code == "exited" and last is not None and last["class"] in advice.EXITS:
        text = advice.EXITS[last["class"]][2].format(name=name)
    if text and text != advice.NOTHING:
        yield f"{DO}{text}"
