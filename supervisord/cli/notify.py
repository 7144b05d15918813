"""`vllm-supervisor notify test [NAME]`: whether a receiver of notifications takes a message, and if not, why."""

from __future__ import annotations

import argparse
import secrets
import socket
import time
from pathlib import Path
from typing import Final

from supervisord.cli import INVALID, NO, OK, REFUSED, complain
from supervisord.cli.check_config import print_problems
from supervisord.config import DEFAULT_PATH, ConfigError, daemon_is_root, load
from supervisord.config_problems import bare_urls
from supervisord.core.messages import Record, Severity
from supervisord.core.spec import NotifySpec
from supervisord.webhook.notice import Notice, body

KIND: Final = "notify_test"
"""Of these messages alone; no event is called so."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser("notify", description="Notifications by webhook: [notify.X] of the configuration.")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, prog="vllm-supervisor notify")
    test = actions.add_parser(
        "test",
        help="send a test message",
        description="Sends a test message to one receiver or to all, once, and says what came of it. Needs no daemon, "
        "and may be used before a reload. Exit code: 0 delivered, 1 not, 2 the configuration is invalid, 5 there is no "
        "such receiver.",
    )
    test.add_argument("receiver", metavar="NAME", nargs="?", help="X of [notify.X]; default: every receiver")
    test.add_argument("--config", metavar="FILE", type=Path, default=DEFAULT_PATH, help=f"default: {DEFAULT_PATH}")


def main(args: argparse.Namespace) -> int:
    """Send it."""
    path: Path = args.config
    try:
        receivers = load(path, trust=daemon_is_root(path), check_files=False).spec.notify
    except ConfigError as error:
        print_problems(error.problems, path)
        return INVALID
    if args.receiver is None and not receivers:
        complain(f"cannot test notifications: {path} has no [notify.NAME]; see docs/notifications.md")
        return REFUSED
    if args.receiver is not None and args.receiver not in receivers:
        known = ", ".join(receivers) or "none"
        complain(f'cannot test "{args.receiver}": {path} has no such receiver; it has: {known}')
        return REFUSED
    wanted = receivers.values() if args.receiver is None else (receivers[args.receiver],)
    failed = [spec for spec in wanted if not _delivered(spec)]
    return NO if failed else OK


def _delivered(spec: NotifySpec) -> bool:
    from supervisord.webhook.post import send  # noqa: PLC0415 (requests: nothing else needs it)

    text = f"this is a test of notify.{spec.name}: no engine is concerned"
    notice = Notice(secrets.token_hex(6), time.time(), Record(KIND, text, Severity.NOTICE))
    began = time.monotonic()
    outcome = send(spec, body(notice, socket.gethostname()), spec.timeout_s)
    place = f"notify.{spec.name} ({bare_urls(spec.url)})"
    if outcome.ok:
        print(f"{place}: delivered in {time.monotonic() - began:.2f} s ({outcome.detail})")
    else:
        complain(f"cannot notify {place}: {outcome.detail}")
    return outcome.ok
