"""Strings that make a backtracking regular expression slow, made from the expression itself.

For each part of it that repeats: what leads there, then what it repeats, over and over, then what cannot follow. And
what leads there, itself over and over: a search tries again at each.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import thread_time
from types import ModuleType
from typing import Any, Final

import supervisord

if sys.version_info >= (3, 11):
    _parser = importlib.import_module("re._parser")
else:
    _parser = importlib.import_module("sre_parse")

SIZES: Final = (8, 16, 24, 64, 256, 1024, 4096, 16384, 65536)
SLOW_S: Final = 0.05
"""Of one thread's CPU. What is linear takes a tenth of that for the longest string."""
GROWTH: Final = 2.5
"""Times the growth of the string: more is not linear. Noise stays below."""
METHODS: Final = frozenset({"search", "match", "fullmatch", "findall", "finditer", "sub", "split"})
_USUAL: Final = 16384
"""What is quick up to this size is not tried with more."""
_LONG: Final = 32
_SUFFIXES: Final = ("", "\x00", "!", "\n", " ", "\x1b")

Text = str | bytes


@dataclass(frozen=True, slots=True)
class Used:
    """A pattern of the package, and how it is used."""

    where: str
    pattern: re.Pattern[Any]
    methods: tuple[str, ...]


# --- the patterns of the package --------------------------------------------------------------------------------------


def modules() -> Iterator[ModuleType]:
    """All of the package."""
    for found in pkgutil.walk_packages(supervisord.__path__, "supervisord."):
        if not found.name.endswith("__main__"):
            yield importlib.import_module(found.name)


def patterns() -> list[Used]:
    """Every pattern that the package makes, with the methods that are called of it (all, where that is not seen)."""
    sources = {module.__name__: Path(str(module.__file__)).read_text(encoding="utf-8") for module in modules()}
    called: dict[str, set[str]] = {}
    found: dict[tuple[str, int], Used] = {}
    for name, source in sources.items():
        for call in ast.walk(ast.parse(source)):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            method, of = call.func.attr, call.func.value
            if method in METHODS and isinstance(of, ast.Name | ast.Attribute):
                last = of.id if isinstance(of, ast.Name) else of.attr
                if last != "re":
                    called.setdefault(last, set()).add(method)
                elif isinstance(call.args[0], ast.Constant) and isinstance(text := call.args[0].value, str):
                    pattern = re.compile(text)
                    found[pattern.pattern, pattern.flags] = Used(f"{name}:{call.lineno}", pattern, (method,))
    for module in modules():
        for name, value in vars(module).items():
            for inner in _inside(value):
                methods = called.get(name if isinstance(value, re.Pattern) else "pattern", METHODS)
                key = (inner.pattern, inner.flags)
                if key not in found:
                    found[key] = Used(f"{module.__name__}.{name}", inner, tuple(sorted(methods)))
    return list(found.values())


def _inside(value: object, depth: int = 3) -> Iterator[re.Pattern[Any]]:
    """Patterns in a value of a module: alone, in containers, in records."""
    if isinstance(value, re.Pattern):
        yield value
    elif depth and isinstance(value, tuple | list | frozenset | set):
        for item in value:
            yield from _inside(item, depth - 1)
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from _inside(item, depth - 1)
    elif depth and isinstance(pattern := getattr(value, "pattern", None), re.Pattern):
        yield pattern


# --- strings ----------------------------------------------------------------------------------------------------------


def attacks(pattern: re.Pattern[Any]) -> list[tuple[str, str, str]]:
    """Heads, pumps and tails for a pattern."""
    text = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode("latin-1")
    parsed = _parser.parse(text, pattern.flags & ~re.DEBUG)
    # A tail that would let it match is no attack, one that lacks the end of the pattern is.
    tails = dict.fromkeys(_SUFFIXES)
    found: dict[tuple[str, str], None] = {}
    for before, bodies in _repeats(list(parsed), ""):
        for body in bodies:
            found[before, body] = None
            found["", before + body] = None
            found[before * 50, body] = None
    whole = _sample(list(parsed), 0)
    for pump in (whole, whole[:-1], " ", "a", "0", "\n", '"', "\\"):
        if pump:
            found["", pump] = None
    return [(head, pump, tail) for head, pump in found for tail in tails]


def _repeats(parts: list[Any], before: str) -> Iterator[tuple[str, list[str]]]:
    """What leads to each part that may repeat often, and what it repeats."""
    for index, (code, value) in enumerate(parts):
        name = str(code)
        here = before + _sample(parts[:index], 0)
        if name in {"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"}:
            _, most, body = value
            if int(most) >= _LONG:
                bodies = [_sample(list(body), choice) for choice in range(4)]
                # What follows is often what the repeated part may hold too: that is where it is ambiguous.
                follows = [_sample(parts[index + 1 : index + length], 0) for length in (2, 3, 4)]
                yield here, [text for text in dict.fromkeys((*bodies, *follows)) if text]
            yield from _repeats(list(body), here)
        elif name == "SUBPATTERN":
            yield from _repeats(list(value[-1]), here)
        elif name == "BRANCH":
            for branch in value[1]:
                yield from _repeats(list(branch), here)
        elif name == "ATOMIC_GROUP":
            yield from _repeats(list(value), here)


def _sample(parts: list[Any], choice: int) -> str:
    """A string that these parts match; `choice` picks among them."""
    return "".join(_one(str(code), value, choice) for code, value in parts)


def _one(name: str, value: Any, choice: int) -> str:
    match name:
        case "LITERAL":
            return chr(value)
        case "NOT_LITERAL":
            return next(c for c in "a0 -" if ord(c) != value)
        case "ANY":
            return "a0 ."[choice % 4]
        case "IN":
            chars = _chars(value)
            return chars[(choice * max(1, len(chars) // 4)) % len(chars)]
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            return _sample(list(value[2]), choice) * max(int(value[0]), 1)
        case "SUBPATTERN" | "ATOMIC_GROUP":
            return _sample(list(value[-1] if name == "SUBPATTERN" else value), choice)
        case "BRANCH":
            return _sample(list(value[1][choice % len(value[1])]), choice)
        case _:  # AT, ASSERT, ASSERT_NOT, GROUPREF
            return ""


def _chars(items: list[Any]) -> str:
    """Some of the characters of a class."""
    probe = [chr(number) for number in range(1, 127)]
    return "".join(char for char in probe if _in(items, char)) or "\u00e9"


def _in(items: list[Any], char: str) -> bool:
    negated = bool(items) and str(items[0][0]) == "NEGATE"
    return any(_has(str(code), value, char) for code, value in items) is not negated


def _has(name: str, value: Any, char: str) -> bool:
    match name:
        case "LITERAL":
            return ord(char) == int(value)
        case "RANGE":
            return int(value[0]) <= ord(char) <= int(value[1])
        case "CATEGORY":
            kind = str(value).removeprefix("CATEGORY_")
            letter = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}[kind.removeprefix("NOT_")]
            return (re.fullmatch(letter, char) is not None) is not kind.startswith("NOT_")
        case _:
            return False


# --- measuring --------------------------------------------------------------------------------------------------------


def slow(used: Used) -> str | None:
    """A sentence about a string that takes more than linear time; None: there is none."""
    for head, pump, tail in attacks(used.pattern):
        for method in used.methods:
            before, before_s = 0, 0.0
            for size in SIZES:
                text = head[:size] + pump * max(1, (size - len(head)) // len(pump)) + tail
                took_s = _took_s(used.pattern, method, text)
                grown = took_s > GROWTH * before_s * size / max(1, before)
                if (took_s > SLOW_S and grown) or took_s > 10 * SLOW_S:
                    return f"{used.where}: {method} of {head[:60]!r} + {pump!r} * n + {tail!r}: {size}: {took_s:.3f} s"
                if size == _USUAL and took_s < SLOW_S / 25:
                    break
                before, before_s = size, took_s
    return None


def _took_s(pattern: re.Pattern[Any], method: str, text: str) -> float:
    data: Text = text if isinstance(pattern.pattern, str) else text.encode("latin-1", "replace")
    begun = thread_time()
    if method == "sub":
        pattern.sub(data[:0], data)
    elif method == "finditer":
        for _ in pattern.finditer(data):
            pass
    else:
        getattr(pattern, method)(data)
    return thread_time() - begun
