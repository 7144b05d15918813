"""`vllm --version`, `vllm serve --help=all`, `vllm serve MODEL ...`."""

# Importing pathlib would cost a third of the start-up time.
# ruff: noqa: PTH110, PTH112

from __future__ import annotations

import errno
import gc
import json
import os
import socket
import sys
import time

from . import flags
from .captures import data_folder, leave, read_help, replay
from .life import Life
from .machine import Leftovers
from .moods import EXIT_BAD_MOOD, BadMoodError, MoodFile, complain
from .server import App
from .tree import limit_life, max_life_s, set_comm
from .wire import Loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_TRITON = "Triton is installed, but doesn't include CPU backend. Disabling Triton.\n"
_ARGUMENT_ERRORS = ("badflag", "badchoice", "badvalue", "config_unknown_key", "spec_old_flag")


def main(args: list[str]) -> None:
    """Never returns."""
    began = time.monotonic()
    deadline = began + max_life_s()
    limit_life(deadline)
    if args[:1] in (["--version"], ["-v"]):
        sys.stdout.write(os.environ.get("VLLM_SIM_VERSION", "0.32.0") + "\n")
        leave(0)
    mood = MoodFile(os.environ.get("VLLM_SIM_MOOD") or None)
    try:
        mood.changed()
        if args[:1] != ["serve"]:
            sys.stderr.write(f"{flags.USAGE_TOP}invalid choice: {args[:1]}\n")
            leave(2)
        serve(args[1:], mood, began, deadline)
    except BadMoodError as error:
        complain(error, mood.path)
        leave(EXIT_BAD_MOOD)


def serve(args: list[str], mood: MoodFile, began: float, deadline: float) -> None:
    data = data_folder()
    help_text = read_help(data)
    if any(word in ("-h", "--help") or word.startswith("--help=") for word in args):
        time.sleep(mood.values["help_delay_s"])
        sys.stdout.buffer.write(help_text.encode())
        leave(0)
    record(args)
    try:
        known = flags.flags_of_help(help_text)
        options = flags.parse(args, known, tuple(mood.values["reject_flags"]))
    except flags.UsageError as error:
        sys.stderr.write(f"{_TRITON}{error}\n")
        leave(2)
    set_comm("vllm")
    fail_as_told(mood.values, data, began)
    check_model(options.model, mood.values, data)
    time.sleep(mood.values["imports_s"])
    start(options, mood, data, deadline)


def start(options: flags.Options, mood: MoodFile, data: str, deadline: float) -> None:
    loop = Loop()
    app = App(loop, options, mood, data)
    announce(app)
    address = (options.text("host", "0.0.0.0"), options.integer("port", 8000))
    listener = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if app.mood["reuse_port"]:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    early = app.mood["bind_early"]
    try:
        if early:
            listener.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            replay(data, "port_in_use", 1)
        sys.stderr.write(f"OSError: {error}\n")
        leave(1)
    try:
        leftovers = Leftovers(app.mood)
    except OSError as error:
        sys.stderr.write(f"zmq.error.ZMQError: {error}\n")
        leave(1)
    if app.mood["children"]:
        gc.freeze()  # the forked processes share what is there now
    app.life = Life(app, listener, leftovers, deadline)
    app.life.begin(None if early else address)
    try:
        loop.run()
    except BadMoodError as error:
        complain(error, mood.path)
        app.life.quit(EXIT_BAD_MOOD)


def announce(app: App) -> None:
    shown: dict[str, Any] = {"model_tag": app.root}
    shown |= {name.replace("-", "_"): value for name, value in app.options.values.items()}
    if "api_key" in shown:
        shown["api_key"] = "***"
    version = os.environ.get("VLLM_SIM_VERSION", "0.32.0")
    app.log("api_utils.py:347", f" version {version}  model {app.root}")
    app.log("api_utils.py:286", f"non-default args: {shown}")


def record(args: list[str]) -> None:
    """Append this start to the file that VLLM_SIM_RECORD names, one JSON line."""
    path = os.environ.get("VLLM_SIM_RECORD")
    if not path:
        return
    line = {"pid": os.getpid(), "at": time.time(), "now": time.monotonic(), "args": args, "env": dict(os.environ)}
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(fd, json.dumps(line).encode() + b"\n")
    os.close(fd)


def fail_as_told(mood: dict[str, Any], data: str, began: float) -> None:
    said = mood["start_error"]
    if not said or ("while_exists" in said and not os.path.exists(said["while_exists"])):
        return
    time.sleep(max(0.0, said.get("after_s", 0) - (time.monotonic() - began)))
    capture = said.get("capture")
    if capture:
        replay(data, capture, said.get("code", 2 if capture in _ARGUMENT_ERRORS else 1))
    stream = sys.stdout if said.get("stream") == "stdout" else sys.stderr
    stream.write(said.get("line", "RuntimeError: simulated failure") + "\n")
    leave(said.get("code", 1))


def check_model(model: str | None, mood: dict[str, Any], data: str) -> None:
    """A path that does not exist is taken for a name on the hub, and that fails."""
    if mood["check_model"] and model and model.startswith("/") and not os.path.isdir(model):
        replay(data, "missing_dir", 1)
