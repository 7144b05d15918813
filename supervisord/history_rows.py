"""From what the loop handed over to rows of the history: encoded, compressed, and samples summed up by five minutes."""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Final

from supervisord.core import codec
from supervisord.core.messages import Observation, Record, Sampled
from supervisord.core.model import Node, Sample
from supervisord.history_store import BUCKET_S, ChunkRow, EventRow, Rows, SampleRow

NODE_EVERY_S: Final = 3600.0
"""A recording can be replayed from a node on, so one is written at least this often."""

_TEXT_MAX: Final = 16_384
_NUMBERS: Final[Mapping[str, Callable[[Sample], float | None]]] = {
    "running": lambda sample: sample.running,
    "waiting": lambda sample: sample.waiting,
    "kv_usage": lambda sample: sample.kv_usage,
    "free_blocks": lambda sample: sample.free_blocks,
    "generation_tokens": lambda sample: sample.generation_tokens,
    "host_bytes": lambda sample: sample.host_bytes,
}


@dataclass(frozen=True, slots=True)
class Seen:
    """An observation, the node as it was before it, and whether something before it was lost."""

    node: Node
    seen: Observation
    now: float
    after_gap: bool


@dataclass(frozen=True, slots=True)
class Told:
    """A record, and when it was made: epoch and monotonic seconds."""

    record: Record
    at: float
    now: float


class Losses:
    """What could not be kept, counted on any thread, and why."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._told = 0
        self._seen = 0
        self._why = ""
        self._events = 0
        self._observations = 0

    def add(self, why: str, *, told: int = 0, seen: int = 0) -> None:
        """Count; the last reason is the one that is said."""
        with self._lock:
            self._told += told
            self._seen += seen
            self._why = why
            self._events += told
            self._observations += seen

    def totals(self) -> tuple[int, int]:
        """Events and observations that were lost since the daemon started."""
        with self._lock:
            return self._events, self._observations

    def take(self) -> str | None:
        """All of it in one sentence, once; None when nothing was lost."""
        with self._lock:
            told, seen, why = self._told, self._seen, self._why
            self._told = self._seen = 0
            self._why = ""
        if not why:
            return None
        return f"{told} events and {seen} observations are missing in the history: {why}"


@dataclass(slots=True)
class _Number:
    """A running mean with its extremes."""

    n: int = 0
    total: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def add(self, value: float) -> None:
        self.n += 1
        self.total += value
        self.low = min(self.low, value)
        self.high = max(self.high, value)


@dataclass(slots=True)
class _Chunk:
    node: Any
    seen: list[Any] = field(default_factory=list)


class Packer:
    """Makes rows. For one thread."""

    def __init__(self, boot_id: str, losses: Losses) -> None:
        self._boot_id = boot_id
        self._losses = losses
        self._node_at: float | None = None
        self._bucket = 0
        self._numbers: dict[tuple[str, str], _Number] = {}

    def gap(self) -> None:
        """Something that was packed is lost: begin anew with a node."""
        self._node_at = None

    def pack(self, items: Iterable[Seen | Told], *, last: bool = False) -> Rows:
        """Rows for what came together; with the `last` ones go the sums of a bucket that is not over yet."""
        at = time.time()
        ended = self._sums() if int(at // BUCKET_S) != self._bucket else ()
        self._bucket = int(at // BUCKET_S)
        events: list[EventRow] = []
        chunks: list[_Chunk] = []
        for item in items:
            if isinstance(item, Told):
                events.append(self._event(item))
            else:
                self._observation(item, chunks)
        rest = self._sums() if last else ()
        return Rows(tuple(events), tuple(self._chunk(chunk, at) for chunk in chunks), (*ended, *rest))

    def _sums(self) -> tuple[SampleRow, ...]:
        """Rows for the samples of the bucket so far; they are merged with what is there of it already."""
        numbers, self._numbers = self._numbers, {}
        return tuple(
            (self._bucket, engine, name, number.n, number.total / number.n, number.low, number.high)
            for (engine, name), number in numbers.items()
        )

    def _observation(self, item: Seen, chunks: list[_Chunk]) -> None:
        due = self._node_at is None or item.after_gap or item.now >= self._node_at + NODE_EVERY_S
        try:
            seen = codec.encode_observation(item.seen)
            node = codec.encode_node(item.node) if due else None
        except TypeError as error:  # EncodeError, or a type that the codec does not know
            self._losses.add(f"internal error: {type(item.seen).__name__}: {error}; please report it", seen=1)
            self.gap()
            return
        if due:
            self._node_at = item.now
        if due or not chunks:
            chunks.append(_Chunk(node))
        chunks[-1].seen.append([item.now, seen])
        if isinstance(item.seen, Sampled):
            self._sum_up(item.seen.engine, item.seen.sample)

    def _sum_up(self, engine: str, sample: Sample) -> None:
        for name, number_of in _NUMBERS.items():
            value = number_of(sample)
            if value is not None and math.isfinite(value):
                self._numbers.setdefault((engine, name), _Number()).add(value)

    def _chunk(self, chunk: _Chunk, at: float) -> ChunkRow:
        document = {"node": chunk.node, "seen": chunk.seen}
        text = json.dumps(document, separators=(",", ":"), allow_nan=False)
        return at, self._boot_id, chunk.node is not None, zlib.compress(text.encode("ascii"))

    def _event(self, told: Told) -> EventRow:
        record = told.record
        numbers = {name: _plain(value) for name, value in record.numbers.items()}
        return (
            told.at,
            self._boot_id,
            told.now,
            record.severity.value,
            record.kind,
            record.engine,
            record.generation,
            record.reason,
            _storable(record.message),
            json.dumps(numbers, separators=(",", ":")),
        )


def _plain(value: float | str | None) -> float | str | None:
    """What JSON has a word for."""
    if isinstance(value, str):
        return _storable(value)
    return value if value is None or math.isfinite(value) else None


def _storable(text: str) -> str:
    """SQLite takes UTF-8 only, and file names may hold anything."""
    return text[:_TEXT_MAX].encode("utf-8", "replace").decode("utf-8")
