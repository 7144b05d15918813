"""The command line as a whole: its words, its exit codes, and what it does not import."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from supervisord import __version__, cli
from supervisord.cli import COMMANDS, main
from tests.adapters.fake_daemon import FakeDaemon, engine


def run(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "supervisord", *argv],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **env},
    )


def test_help_names_every_command_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for name, (_, text) in COMMANDS.items():
        assert name in out
        assert text in " ".join(out.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_module_and_its_own_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(import_module(f"supervisord.cli.{COMMANDS[name][0]}").main)
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: vllm-supervisor {name} ")
    assert "--socket PATH" in out
    assert main(["--help", name]) == 0
    assert capsys.readouterr().out.startswith("usage: vllm-supervisor [-h]")


def test_a_word_that_could_drive_a_terminal_is_told_without_that(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "qwen", "\x1b[2J\udcd5more\n"]) == cli.USAGE
    told = "unrecognized arguments:  more ; try: vllm-supervisor logs --help\n"
    assert capsys.readouterr().err == f"vllm-supervisor logs: cannot understand the command line: {told}"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"vllm-supervisor {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["statsu"], "cannot find the command 'statsu'; did you mean status?"),
        (["--socket", "x", "restrat"], "cannot find the command 'restrat'; did you mean restart?"),
        (["xyzzy"], "cannot find the command 'xyzzy'; try: vllm-supervisor --help"),
        (["\x1b[31m"], "cannot find the command '\\x1b[31m'; try"),
        (["--bogus"], "the following arguments are required: COMMAND"),
        (["--bogus", "status"], "unrecognized arguments: --bogus"),
        (["--socket"], "argument --socket: expected one argument"),
        (["--sock", "x", "status"], "cannot find the command 'x'"),
        (["status", "--jso"], "unrecognized arguments: --jso"),
        (["status", "a", "b"], "unrecognized arguments: b"),
    ],
)
def test_a_line_that_makes_no_sense_is_64(argv: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("vllm-supervisor")
    assert told in err
    assert err.count("\n") == 1


def test_the_socket_may_stand_anywhere_and_beats_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def reached(*argv: str) -> str:
        assert main(list(argv)) == 3
        return capsys.readouterr().err.split("daemon at ")[1].split(":")[0]

    a, b, c = (str(tmp_path / name) for name in "abc")
    monkeypatch.delenv("VLLM_SUPERVISOR_SOCKET", raising=False)
    monkeypatch.setattr(cli, "DEFAULT_SOCKET", c)
    assert reached("status") == c
    assert reached("--socket", a, "status") == a
    assert reached("status", "--socket", a) == a
    assert reached(f"--socket={b}", "status", f"--socket={a}") == a
    monkeypatch.setenv("VLLM_SUPERVISOR_SOCKET", b)
    assert reached("status") == b
    assert reached("--socket", a, "status") == a
    assert reached("status", "qwen", "--socket", a) == a


def test_the_exit_codes_of_a_process(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, engine("qwen")) as daemon:
        assert run("status", VLLM_SUPERVISOR_SOCKET=daemon.socket).returncode == 0
        assert run("--socket", daemon.socket, "status", "nobody").returncode == 5
    found = run("status", "--socket", daemon.socket)
    assert (found.returncode, found.stdout) == (3, "")
    assert found.stderr.startswith("vllm-supervisor: cannot reach the daemon")
    assert run("nonsense").returncode == 64


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_socket_that_one_may_not_use_is_4(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, engine("qwen")) as daemon:
        # Only the socket itself is closed to others, not the way to it.
        code = (
            "import os, sys\n"
            "from supervisord.cli import main\n"
            "main(['status', '--socket', '/none'])\n"  # what it imports is out of reach later
            "print(end='-', file=sys.stderr)\n"
            f"folder = os.open({str(tmp_path)!r}, os.O_RDONLY)\n"
            "os.fchdir(folder)\n"
            "os.chmod('.', 0o755)\n"
            "os.setgid(65534); os.setuid(65534)\n"
            "sys.exit(main(['status', '--socket', 'c.sock']))\n"
        )
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert (found.returncode, found.stdout) == (4, "")
        told = found.stderr.split("\n-")[1]
        assert told.startswith("vllm-supervisor: cannot talk to the daemon at c.sock: permission denied; ")
        assert "vllm-admin" in told
        assert daemon.errors == []


def test_a_bug_is_a_sentence_and_70(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("some\x1b[31mthing")

    monkeypatch.setattr("supervisord.cli.status.get", broken)
    assert main(["status"]) == 70
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(
        "vllm-supervisor: internal error: RuntimeError: something (tests.adapters.test_cli_main, line "
    )
    assert "Traceback" not in err


@pytest.mark.parametrize("words", ["status", "status --json", "status qwen", "events", "gpu", "plan --help"])
def test_an_output_that_is_full_or_closed_is_no_bug_of_ours(words: str, tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, engine("qwen")) as daemon:
        line = f"{sys.executable} -m supervisord --socket {daemon.socket} {words}"
        full = subprocess.run(["/bin/sh", "-c", f"{line} >/dev/full"], capture_output=True, text=True, check=False)
        closed = subprocess.run(["/bin/sh", "-c", f"{line} >&-"], capture_output=True, text=True, check=False)
    assert (closed.returncode, closed.stderr) == (0, "")
    assert (full.returncode, full.stderr) == (
        70,
        "vllm-supervisor: cannot write what there is to say: No space left on device\n",
    )


def test_a_terminal_that_cannot_write_a_name_gets_a_question_mark(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, engine("qwen", model="模型")) as daemon:
        found = run("status", VLLM_SUPERVISOR_SOCKET=daemon.socket, PYTHONIOENCODING="latin-1")
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.splitlines()[3].endswith(" ??")


def test_help_into_a_closed_pipe_is_silent() -> None:
    argv = [sys.executable, "-m", "supervisord", "--help"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()  # it needs far longer to start
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert process.wait(20) in {0, 141}  # argparse drops what it cannot write to an unbuffered stdout


HEAVY = {
    "asyncio",
    "supervisord.cli.frame",
    "supervisord.cli.watch",
    "textwrap",
    "unicodedata",
    "dataclasses",
    "http",
    "inspect",
    "logging",
    "pathlib",
    "requests",
    "shutil",
    "sqlite3",
    "structlog",
    "subprocess",
    "tomllib",
    "typing",
    "urllib",
    "supervisord.core",
    "supervisord.app",
    "supervisord.config",
    "supervisord.cli.plan",
    "supervisord.control.server",
}


@pytest.mark.parametrize(
    "argv",
    [["status"], ["status", "--json"], ["stop", "qwen"], ["logs", "qwen"], ["reload"], ["events"], ["why", "qwen"]],
)
def test_no_command_pays_for_what_it_does_not_use(tmp_path: Path, argv: list[str]) -> None:
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "from supervisord.cli import main\n"
        f"main({argv!r})\n"
        "print(*sorted(set(sys.modules) - before), file=sys.stderr)\n"
    )
    with FakeDaemon(tmp_path, engine("qwen")) as daemon:
        found = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env={**os.environ, "VLLM_SUPERVISOR_SOCKET": daemon.socket},
        )
    assert HEAVY.isdisjoint(found.stderr.split())
