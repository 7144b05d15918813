"""Prompts for a warm-up, and whether what came back is text."""

from __future__ import annotations

import math
import os
import stat
from typing import Final

from supervisord.engine.http import Answer

_PRIME_BYTES: Final = 1 << 20
_REPEATED_MIN: Final = 4


def batch_lengths(batch_tokens: int, longest: int, pool_tokens: int | None) -> list[int]:
    """Lengths of prompts that fill a batch of `batch_tokens` in two shapes, within nine tenths of the KV pool.

    Long ones first: they fill a step also when the engine runs few sequences at once. Then eight to a batch. Twice the
    batch in all, because the first step takes what has arrived by then and only the next one is full.
    """
    shapes = (min(longest, batch_tokens), min(longest, max(1, batch_tokens // 8)))
    lengths = [length for length in shapes for _ in range(math.ceil(batch_tokens / length))]
    if pool_tokens is None:
        return lengths
    kept, room = lengths[:1], pool_tokens * 9 // 10 - lengths[0]
    for length in lengths[1:]:
        if length <= room:
            kept.append(length)
            room -= length
    return kept


def new_ids(length: int) -> list[int]:
    """Token ids that nobody has sent before, or the prefix cache would skip the prefill.

    100 to 250 is in every vocabulary, and special tokens sit below or at the end.
    """
    return [100 + byte % 151 for byte in os.urandom(length)]


def new_text(tokens: int) -> str:
    """The same as text: four characters for each four tokens, which is never more with any tokenizer."""
    return " ".join(os.urandom(2).hex()[:3] for _ in range(max(1, tokens // 4)))


def is_sane(text: str) -> bool:
    """Not blank, and not one repeated character (three of one kind can be an answer: "...")."""
    shown = "".join(text.split())
    return len(set(shown)) > 1 or 0 < len(shown) < _REPEATED_MIN


def generated(answer: Answer) -> str:
    """The generated text; reasoning counts. "" when there is none."""
    choices = answer.json_object().get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    message = choice.get("message")
    found = [choice.get("text")]
    if isinstance(message, dict):
        found += [message.get(key) for key in ("content", "reasoning_content", "reasoning")]
    return "".join(text for text in found if isinstance(text, str))


def read_prompt(path: str) -> str:
    """A prompt file, at most 1 MiB. Raises OSError, also for what is no regular file (a pipe would never end)."""
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(0, "not a regular file")
        content = file.read(_PRIME_BYTES + 1)
    if len(content) > _PRIME_BYTES:
        raise OSError(0, "larger than 1 MiB")
    return content.decode("utf-8", "replace")


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
