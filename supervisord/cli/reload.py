"""`reload`: apply a changed configuration; one that does not validate changes nothing."""

from __future__ import annotations

from supervisord.cli import INVALID, OK, complain, render
from supervisord.cli.request import Goal, add_wait, deadline_of, follow
from supervisord.control.client import RefusedError, post

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Final

_VALIDATE_S: Final = 120.0
"""A reload reads the flags that each installed vLLM knows, which starts its Python."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "reload",
        description="Validates the configuration and applies it; only engines whose launch changes are restarted. "
        "Exit code: 0 accepted (with --wait: applied), 1 an engine failed, 2 the configuration is invalid, "
        "6 not applied within --timeout.",
    )
    add_wait(parser)


def main(args: argparse.Namespace) -> int:
    """Reload; with --wait until every engine that it touches has come to rest."""
    deadline = deadline_of(args)
    try:
        answer = post(args.socket, "/v1/reload", timeout_s=_VALIDATE_S).document()
    except RefusedError as error:
        if error.code != "invalid_configuration":
            raise
        for problem in error.document.get("messages", []):
            complain(problem)
        complain(str(error))
        return INVALID
    for message in answer["messages"] or ["nothing changes"]:
        print(render.clean(message), flush=True)
    if not args.wait:
        return OK
    return max((follow(args.socket, Goal("reload", name), deadline) for name in answer["engines"]), default=OK)
