"""What a mood file may say, with defaults; README.md explains every key."""

# Importing pathlib would cost a third of the start-up time.
# ruff: noqa: PTH116, PTH120, PTH123

from __future__ import annotations

import json
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

EXIT_BAD_MOOD = 70

ENDPOINTS = ("health", "metrics", "completion", "models")

_NUM = "a number >= 0"
_INT = "an integer >= 0"
_BOOL = "true or false"
_STR = "a string"
_LIST = "a list of strings"
_TABLE = "a table"
_NULL = "null"

# key: (default, accepted kinds; a tuple holds literal values)
SCHEMA: dict[str, tuple[Any, tuple[Any, ...]]] = {
    # start
    "ready_delay_s": (0, (_NUM,)),
    "imports_s": (0, (_NUM,)),
    "start_lines": (None, (_NULL, _LIST, _STR)),
    "start_error": (None, (_NULL, _TABLE)),
    "reject_flags": ([], (_LIST,)),
    "check_model": (False, (_BOOL,)),
    "bind_early": (True, (_BOOL,)),
    "reuse_port": (False, (_BOOL,)),
    "swallow_sigterm_while_starting": (True, (_BOOL,)),
    "help_delay_s": (0, (_NUM,)),
    # processes
    "children": (True, (_BOOL,)),
    "orphans": (True, (_BOOL,)),
    "orphan_stop_s": (0.3, (_NUM,)),
    "escape": (False, (_BOOL,)),
    "ignore_sigterm": (False, (_BOOL, ("parent", "children", "all"))),
    "exit": (None, (_NULL, _TABLE)),
    "dead_503_s": (2.5, (_NUM,)),
    "dead_exit_s": (0.1, (_NUM,)),
    "worker_death_s": (0.2, (_NUM,)),
    # stop
    "stop_delay_s": (0.05, (_NUM,)),
    "stop_busy": ("hang", (("hang", "abort"),)),
    "drain_idle_s": (0, (_NUM,)),
    "drain_refuses": (False, (_BOOL,)),
    # answers
    "health": (200, (_INT, _TABLE)),
    "models": (200, (_INT,)),
    "health_delay_s": (0, (_NUM,)),
    "metrics_delay_s": (0, (_NUM,)),
    "models_delay_s": (0, (_NUM,)),
    "completion_delay_s": (0, (_NUM,)),
    "hang": ([], (_BOOL, _LIST)),
    "drip": (None, (_NULL, _TABLE)),
    "keep_alive_s": (5, (_NUM,)),
    "api_key": (None, (_NULL, _STR)),
    # the metrics page
    "metrics": (None, (_NULL, _INT, _STR)),
    "metrics_template": ("idle", (_STR,)),
    "gauges": ({}, (_TABLE,)),
    "counters": ({}, (_TABLE,)),
    "rates": ({}, (_TABLE,)),
    "rename": ({}, (_TABLE,)),
    "drop": ([], (_LIST,)),
    "blocks": (None, (_NULL, _INT, _STR)),
    "free_blocks": (None, (_NULL, _INT, _TABLE)),
    "garbage_page": (False, (_BOOL, ("binary", "html", "truncated", "control", "nan"))),
    "huge_mib": (0, (_NUM,)),
    # work
    "engines": (None, (_NULL, _INT)),
    "completion": ("ok", (_INT, ("ok", "hang", "garbage", "empty"))),
    "first_delay_s": (0, (_NUM,)),
    "first_delay_requests": (1, (_INT,)),
    "tokens_per_s": (500, (_NUM,)),
    "prefill_tokens_per_s": (200000, (_NUM,)),
    "eos_after": (0, (_INT,)),
    "freeze": (False, (_BOOL, "a list of ranks")),
    "admit": (True, (_BOOL,)),
    "wedge_on_abort": (False, (_BOOL,)),
    "asleep": (0, ((0, 1, 2),)),
    # the machine
    "allocate_mib": (0, (_NUM,)),
    "leak_mib_per_s": (0, (_NUM,)),
    "shm": (True, (_BOOL,)),
    "tmp_files": (True, (_BOOL,)),
    "spam": (None, (_NULL, _TABLE)),
    "gpu_mib": (2048, (_NUM,)),
    "gpu_leak_mib_per_s": (0, (_NUM,)),
    "gpu_workspace_mib": (0, (_NUM,)),
    "gpu_release_delay_s": (0, (_NUM,)),
}

DEFAULTS: dict[str, Any] = {key: default for key, (default, _) in SCHEMA.items()}

# table: its keys with their kinds
_TABLES: dict[str, dict[str, tuple[Any, ...]]] = {
    "start_error": {
        "capture": (_STR,), "line": (_STR,), "stream": (("stdout", "stderr"),),
        "after_s": (_NUM,), "code": (_INT,), "while_exists": (_STR,),
    },
    "exit": {
        "after_s": (_NUM,), "code": (_INT,), "signal": (_INT, _STR),
        "process": (("api", "engine", "worker"),),
    },
    "drip": {"bytes": (_INT,), "interval_s": (_NUM,), "on": (_LIST,)},
    "spam": {"lines_per_s": (_NUM,), "line": (_STR,), "stream": (("stdout", "stderr"),)},
    "health": {"status": (_INT,), "json": (_TABLE,), "body": (_STR,), "headers": (_TABLE,)},
    "free_blocks": {"value": (_INT,), "until_step": (_BOOL,)},
}  # fmt: skip

# keys that an engine core needs to know; the API process passes them on
ENGINE_KEYS = (
    "tokens_per_s", "prefill_tokens_per_s", "first_delay_s", "first_delay_requests", "freeze",
    "admit", "wedge_on_abort", "asleep", "leak_mib_per_s", "gpu_mib", "gpu_leak_mib_per_s",
    "gpu_workspace_mib",
    "orphan_stop_s", "orphans", "ignore_sigterm", "worker_death_s", "dead_503_s",
)  # fmt: skip

# values of ignore_sigterm
STUBBORN_PARENT = (True, "parent", "all")
STUBBORN_CHILDREN = (True, "children", "all")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(kind, tuple):
        return not isinstance(value, bool) and value in kind
    if kind is _NUM:
        return _is_number(value)
    if kind is _INT:
        return _is_number(value) and isinstance(value, int)
    if kind == "a list of ranks":
        return isinstance(value, list) and all(_fits(item, _INT) for item in value)
    if kind is _LIST:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    simple = {_BOOL: bool, _STR: str, _TABLE: dict, _NULL: type(None)}
    return isinstance(value, simple[kind])


def _problem(path: str, value: Any, kinds: tuple[Any, ...]) -> str | None:
    if any(_fits(value, kind) for kind in kinds):
        return None
    wanted = (" or ".join(repr(item) for item in kind) if isinstance(kind, tuple) else kind for kind in kinds)
    return f"{path}: {value!r} is not {', or '.join(wanted)}"


def problems(raw: Any) -> list[str]:
    """Everything that is wrong with a mood, in words; empty when it is fine."""
    if not isinstance(raw, dict):
        return [f"the mood is {type(raw).__name__}, not a table"]
    found: list[str | None] = []
    for key, value in raw.items():
        if key not in SCHEMA:
            found.append(f"unknown key {key!r}")
            continue
        found.append(_problem(key, value, SCHEMA[key][1]))
        if isinstance(value, dict) and key in _TABLES:
            allowed = _TABLES[key]
            found += [
                _problem(f"{key}.{name}", item, allowed[name])
                if name in allowed
                else f"unknown key {key + '.' + name!r}"
                for name, item in value.items()
            ]
    hang = raw.get("hang")
    for name in hang if isinstance(hang, list) else []:
        if name not in ENDPOINTS:
            found.append(f"hang: {name!r} is none of {', '.join(ENDPOINTS)}")
    return [text for text in found if text is not None]


class MoodFile:
    """The mood as the file says it now; a bad file ends the process loudly."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.values: dict[str, Any] = dict(DEFAULTS)
        self._seen: tuple[int, int, int] | None = None

    def changed(self) -> bool:
        """Read the file again if it is another one than last time."""
        if self.path is None:
            return False
        try:
            stat = os.stat(self.path)
        except FileNotFoundError:
            seen = None
        else:
            seen = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if seen == self._seen:
            return False
        self._seen = seen
        self.values = {**DEFAULTS, **(self._read() if seen else {})}
        return True

    def _read(self) -> dict[str, Any]:
        assert self.path is not None
        try:
            with open(self.path, encoding="utf-8") as file:
                raw: Any = json.load(file)
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise BadMoodError([f"not JSON: {error}"]) from None
        found = problems(raw)
        if found:
            raise BadMoodError(found)
        assert isinstance(raw, dict)
        return raw


def watch(path: str) -> int | None:
    """A descriptor that becomes readable when the file may have changed; None: poll instead.

    The kernel takes 4 to 16 ms longer to end a process that has one: it waits until nobody looks at the watches.
    """
    import ctypes  # noqa: PLC0415 (only engines with a mood pay for it)

    moved_to, created, deleted, close_write = 0x80, 0x100, 0x200, 0x8
    nonblock_cloexec = 0o2004000
    libc = ctypes.CDLL(None)
    fd: int = libc.inotify_init1(nonblock_cloexec)
    if fd < 0:  # the user has too many of them
        return None
    folder = os.path.dirname(path) or "."
    if libc.inotify_add_watch(fd, folder.encode(), moved_to | created | deleted | close_write) < 0:
        os.close(fd)
        return None
    return fd


class BadMoodError(Exception):
    """The mood file cannot be obeyed."""

    def __init__(self, found: list[str]) -> None:
        super().__init__("; ".join(found))
        self.found = found


def complain(error: BadMoodError, path: str | None) -> None:
    """Say on stderr what is wrong with the mood file."""
    for text in error.found:
        sys.stderr.write(f"simulated vllm: cannot obey mood {path}: {text}\n")
    sys.stderr.flush()
