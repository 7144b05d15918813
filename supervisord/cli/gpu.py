"""`gpu`: the GPUs, what is on them and what is wrong with them; and the few things that can be asked of them."""

from __future__ import annotations

import argparse
import json

from supervisord.cli import NO, OK, render
from supervisord.control.client import get, post

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final

    Document = dict[str, Any]

_CONFIG: Final = "/etc/vllm-supervisor/config.toml"
_ACCEPT_S: Final = 30.0
_PROG: Final = "vllm-supervisor gpu"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "gpu",
        description="Shows the GPUs of the node. Exit code: 0 all are well; 1 one is degraded or quarantined, or "
        "engines need GPUs of which nothing is known; 3 the daemon does not run.",
        epilog="What is not known is a dash. GPU: UUID, PCI id or index.",
    )
    parser.add_argument("--json", action="store_true", help="the same for programs")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", prog=_PROG)
    clear = actions.add_parser(
        "clear",
        help="trust a quarantined GPU again",
        description="Ends the quarantine of a GPU, once its cause is mended; the next look may find it faulty again. "
        "Also looks at all GPUs again at once after `gpu release`.",
    )
    clear.add_argument("gpu", metavar="GPU", help="UUID, PCI id or index")
    release = actions.add_parser(
        "release",
        help="close NVML for a while, so that a GPU can be reset",
        description="Closes NVML for 10 minutes: a process that has it open keeps a GPU from being reset. Stop the "
        "engines of that GPU first: they keep it open too.",
    )
    for action in (clear, release):
        action.add_argument("--socket", metavar="PATH", default=argparse.SUPPRESS, help="control socket")
    persistence = actions.add_parser(
        "persistence",
        help="set persistence mode by the configuration, without the daemon",
        description="Sets the persistence mode of every GPU as [gpu] of the configuration wants it and reads it back; "
        "for use at boot. The daemon does the same while it runs. Exit code: 0 all is as wanted, 1 something could not "
        "be set (--dry-run: would be set), 2 the configuration is invalid, 4 it needs root, 6 NVML hangs.",
    )
    persistence.add_argument("--dry-run", action="store_true", help="only say what would be set")
    persistence.add_argument("--config", metavar="FILE", default=_CONFIG, help=f"configuration (default: {_CONFIG})")


def main(args: argparse.Namespace) -> int:
    """Show, or ask for something."""
    if args.action == "persistence":
        from supervisord.cli import gpu_persistence  # noqa: PLC0415 - reads the configuration, which costs

        return gpu_persistence.main(args)
    if args.action is not None:
        document = {"gpu": args.gpu} if args.action == "clear" else None
        answer = post(args.socket, f"/v1/gpus/{args.action}", document, _ACCEPT_S).document()
        print(render.clean(answer["message"]))
        if args.action == "release":
            print("afterwards, to look at the GPUs again at once: vllm-supervisor gpu clear GPU")
        return OK
    return _show(get(args.socket, "/v1/status").document(), as_json=args.json)


def _show(status: Document, *, as_json: bool) -> int:
    daemon, gpus = status["supervisor"], status["gpus"]
    driver, trouble = daemon["driver"], daemon["gpu_trouble"]
    if as_json:
        document = {"version": status["version"], "driver": driver, "gpu_trouble": trouble, "gpus": gpus}
        print(json.dumps(document, indent=2))
    else:
        from supervisord.cli import render_gpus  # noqa: PLC0415 - only people need it

        width, colour = render.terminal()
        print(render_gpus.view(gpus, driver, trouble, width=width, colour=colour), end="")
    needed = any(engine["gpus"] for engine in status["engines"])
    unwell = any(gpu["health"] != "ok" for gpu in gpus)
    return NO if unwell or (needed and trouble is not None) else OK
