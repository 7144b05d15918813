"""What scripts/demo sees from outside: standard library only, and nothing of the supervisor's own code.

demo_checks.py state ENGINE                   reads `status --json` on stdin; prints: state, pid, reasons
demo_checks.py tree PID                       prints "pid start-time" of the process and everything under it
demo_checks.py left MARKER FOLDER SEEN        prints what still lives of the demo: pid, command line
demo_checks.py ask PORT MODEL PID             a completion, and the proof that it came from PID's process tree
demo_checks.py port                           prints a free port
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import sys
import time
from pathlib import Path
from typing import NamedTuple, NoReturn

PROC = Path("/proc")
LISTEN = "0A"  # in /proc/net/tcp


class Process(NamedTuple):
    """What /proc/PID/stat says, as far as it is needed. Number and start time together name a process for ever."""

    pid: int
    parent: int
    started: int
    zombie: bool


def fail(message: str) -> NoReturn:
    """Ends with the reason on stderr."""
    sys.stderr.write(f"demo: {message}\n")
    raise SystemExit(1)


def processes() -> dict[int, Process]:
    """Every process that can be seen."""
    found = {}
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue  # it ended meanwhile
        # The name in brackets may itself hold spaces and brackets.
        fields = stat[stat.rindex(")") + 2 :].split()
        pid = int(entry.name)
        found[pid] = Process(pid, int(fields[1]), int(fields[19]), fields[0] in "ZX")
    return found


def tree(root: int) -> list[Process]:
    """The process and its descendants."""
    everything = processes()
    members = [everything[root]] if root in everything else []
    for member in members:  # grows while it is walked
        members.extend(p for p in everything.values() if p.parent == member.pid)
    return members


def names_marker(pid: int, marker: str) -> bool:
    """Whether the process was started with the marker in its environment."""
    try:
        return marker.encode() in (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def uses_folder(pid: int, folder: str) -> bool:
    """Whether the process works in the folder or has a file of it open."""
    base = PROC / str(pid)
    try:
        links = [base / "cwd", *(base / "fd").iterdir()]
    except OSError:
        return False
    return any(points_into(link, folder) for link in links)


def points_into(link: Path, folder: str) -> bool:
    """Whether a link of /proc leads into the folder."""
    try:
        return f"{link.readlink()}/".startswith(folder + "/")
    except OSError:
        return False


def left(marker: str, folder: str, seen: Path) -> list[Process]:
    """What still lives of the demo.

    Three signs are needed: vLLM's workers rewrite their title over their environment, so that the marker is gone from
    the very processes that are most often left behind. Those were seen under the supervisor or hold its files open.
    """
    known = {tuple(map(int, line.split())) for line in seen.read_text().splitlines()}
    own = {os.getpid(), os.getppid()}
    return [
        p
        for p in processes().values()
        if p.pid not in own
        and not p.zombie
        and ((p.pid, p.started) in known or names_marker(p.pid, marker) or uses_folder(p.pid, folder))
    ]


def title(pid: int) -> str:
    """The command line for people."""
    try:
        return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "(ended)"


def listening_sockets(port: int) -> set[str]:
    """The inodes of the sockets that listen on the port."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = (PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == LISTEN and int(fields[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    return inodes


def owns_port(root: int, port: int) -> bool:
    """Whether a process of the tree holds a listening socket of the port."""
    sockets = listening_sockets(port)
    for process in tree(root):
        try:
            links = [str(link.readlink()) for link in (PROC / str(process.pid) / "fd").iterdir()]
        except OSError:
            continue
        if sockets.intersection(links):
            return True
    return False


def complete(port: int, model: str, prompt: str) -> tuple[dict[str, object], float]:
    """One completion: the answer, and the milliseconds that it took."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 48, "temperature": 0})
    before = time.monotonic()
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    raw = response.read()
    took_ms = (time.monotonic() - before) * 1000
    connection.close()
    if response.status != http.client.OK:
        fail(f"the engine answered the completion with status {response.status}: {raw[:300]!r}")
    answer = json.loads(raw)
    if not isinstance(answer, dict):
        fail(f"the engine answered the completion with {raw[:300]!r}")
    return answer, took_ms


def ask(port: int, model: str, pid: int) -> None:
    """Prints a completion; ends with 1 unless it came from the engine."""
    prompt = "Hello, who are you?"
    if not owns_port(pid, port):
        fail(f"cannot trust port {port}: no process of the engine (pid {pid}) listens there")
    try:
        answer, took_ms = complete(port, model, prompt)
    except (OSError, ValueError, http.client.HTTPException) as error:
        fail(f"cannot get a completion from port {port}: {error}")
    usage, choices = answer.get("usage"), answer.get("choices")
    if not (isinstance(usage, dict) and isinstance(choices, list) and choices and isinstance(choices[0], dict)):
        fail(f"cannot read the completion: {answer}")
    tokens = usage.get("completion_tokens")
    if answer.get("model") != model or not isinstance(tokens, int) or tokens <= 0:
        fail(f"cannot accept the completion: model {answer.get('model')!r}, {tokens!r} tokens")
    print(f"  prompt:  {prompt}")
    print(f"  answer: {printable(str(choices[0].get('text')))}")
    print(f"  {usage.get('prompt_tokens')} prompt tokens, {tokens} completion tokens, {took_ms:.0f} ms, from pid {pid}")


def printable(text: str) -> str:
    """What an engine says goes to a terminal only without control characters."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", "?", text)


def state(engine: str) -> None:
    """Prints state, pid (or 0) and the reasons of one engine; state "unknown" if the status cannot be read."""
    try:
        engines = json.load(sys.stdin)["engines"]
        (one,) = (e for e in engines if e["name"] == engine)
        # A code that only repeats the state says nothing new.
        reasons = "; ".join(
            r["message"] if r["code"] == one["state"] else f"{r['code']}: {r['message']}" for r in one["reasons"]
        )
        print(one["state"], one["pid"] or 0, printable(reasons))
    except (ValueError, KeyError, TypeError):
        print("unknown", 0, "")


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(argv: list[str]) -> None:
    """Runs one subcommand."""
    match argv:
        case ["state", engine]:
            state(engine)
        case ["tree", pid]:
            for process in tree(int(pid)):
                print(process.pid, process.started)
        case ["left", marker, folder, seen]:
            for process in left(marker, folder, Path(seen)):
                print(process.pid, title(process.pid))
        case ["ask", port, model, pid]:
            ask(int(port), model, int(pid))
        case ["port"]:
            print(free_port())
        case _:
            sys.stderr.write(__doc__ or "")
            raise SystemExit(64)


if __name__ == "__main__":
    main(sys.argv[1:])
