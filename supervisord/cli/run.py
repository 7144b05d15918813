"""`run`: the daemon, in the foreground."""

from __future__ import annotations

from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Final

_CONFIG: Final = "/etc/vllm-supervisor/config.toml"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "run",
        description="Runs the daemon until SIGTERM. Exit code: 2 the configuration is invalid, 75 another one runs.",
    )
    parser.add_argument("--config", metavar="FILE", default=_CONFIG, help=f"configuration (default: {_CONFIG})")


def main(args: argparse.Namespace) -> int:
    """Run the daemon; only here is it imported."""
    from supervisord.app import run  # noqa: PLC0415 - no other command pays for the daemon's imports

    return run(Path(args.config))
