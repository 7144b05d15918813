"""Names of engines for the shell's completion: from the running daemon, quickly, and silently when there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.daemon.harness import Daemon
from tests.daemon.sims import Sim, section

ROOT = Path(__file__).resolve().parents[2]
COMPLETE = """
source "$1"
COMP_WORDS=(vllm-supervisor --socket "$2" restart "$3"); COMP_CWORD=4
_vllm_supervisor
printf '%s\\n' "${COMPREPLY[@]}"
"""


def completed(folder: Path, socket: Path, word: str) -> list[str]:
    """What bash offers for a word after `restart`, and that nobody complains."""
    command = ["bash", "-c", COMPLETE, "bash", str(folder / "completion"), str(socket), word]
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stderr == ""
    return done.stdout.split()


def test_names_come_from_the_daemon(tmp_path: Path) -> None:
    text = subprocess.run([sys.executable, ROOT / "scripts/cli_texts.py", "bash"], capture_output=True, check=True)
    (tmp_path / "completion").write_bytes(text.stdout)
    program = tmp_path / "vllm-supervisor"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m supervisord "$@"\n')
    program.chmod(0o755)
    sims = [Sim(tmp_path, name) for name in ("qwen", "quick", "code")]
    with Daemon(section(*sims)) as daemon:
        assert completed(tmp_path, daemon.socket, "q") == []
        daemon.start()
        assert completed(tmp_path, daemon.socket, "q") == ["qwen", "quick"]
        assert daemon.stop() == 0
        assert completed(tmp_path, daemon.socket, "q") == []
