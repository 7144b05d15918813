"""The flags of an installed vLLM: its help text, how it is asked for it, and the cache of what it said."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from time import thread_time
from typing import Any

import pytest

from supervisord.config_users import own_account
from supervisord.core.spec import EngineSpec
from supervisord.engine import flags as flags_module
from supervisord.engine import flags_ask
from supervisord.engine.flags import MAYBE, NOTHING, ONE, SEVERAL, Flag, FlagBook, FlagSet, Unread, parse_help
from tests.adapters.fake_installation import HELP, FakeInstallation, open_home
from tests.sim.engine import SIM_PATH, alive, wait_until

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="starts a process as another user")


@pytest.fixture
def home() -> Iterator[Path]:
    with open_home() as path:
        yield path


@pytest.fixture
def fake(home: Path) -> FakeInstallation:
    return FakeInstallation(home)


def good(found: FlagSet | Unread) -> FlagSet:
    assert isinstance(found, FlagSet), found
    return found


def bad(found: FlagSet | Unread) -> Unread:
    assert isinstance(found, Unread)
    return found


# --- the text ---------------------------------------------------------------------------------------------------------


def test_the_captured_help() -> None:
    found = good(parse_help(HELP, "0.32.0") or Unread("incomplete"))
    assert len(set(found.names.values())) == 317
    for name, flag in {
        "max-model-len": Flag("max-model-len", ONE),
        "enable-prefix-caching": Flag("enable-prefix-caching", NOTHING, negative=True),
        "disable-log-stats": Flag("disable-log-stats", NOTHING),
        "api-key": Flag("api-key", SEVERAL),
        "hf-token": Flag("hf-token", MAYBE),
        "tokenizer-mode": Flag("tokenizer-mode", ONE),
        "runner": Flag("runner", ONE, choices=("auto", "draft", "generate", "pooling")),
        "device-memory-utilization": Flag("gpu-memory-utilization", ONE),
        "-tp": Flag("tensor-parallel-size", ONE),
        "-ep": Flag("enable-expert-parallel", NOTHING, negative=True),
    }.items():
        assert found.get(name) == flag, name
    assert found.get("no-enable-prefix-caching") is None
    assert found.canonical("device-memory-utilization") == "gpu-memory-utilization"
    assert found.canonical("never-heard-of") == "never-heard-of"
    assert found.get("swap-space") is None


def test_names_with_one_value_as_python_3_13_prints_them() -> None:
    needed = "".join(f"  --{name} X\n" for name in sorted(flags_module._EVERY_RELEASE))
    found = parse_help(f"{needed}  -q, --quantization QUANTIZATION\n  -O\n      --not-a-flag of a description\n")
    assert found is not None
    assert found.get("quantization") == found.get("-q") == Flag("quantization", ONE)
    assert found.get("-O") is None
    assert found.get("not-a-flag") is None


@pytest.mark.parametrize("text", ["", "serve\n--help=all\n", HELP[: len(HELP) // 4], "  --port PORT\n"])
def test_a_text_that_is_not_the_whole_help(text: str) -> None:
    assert parse_help(text) is None


# --- asking -----------------------------------------------------------------------------------------------------------


def test_asked_once_for_each_installation(fake: FakeInstallation) -> None:
    first = good(fake.book().read(fake.spec()))
    again = good(fake.book().read(fake.spec(model="other/model")))
    assert first == again == good(fake.book().known(fake.spec()))
    assert [start["argv"] for start in fake.asked()] == [["serve", "--help=all"]]
    assert stat.S_IMODE(fake.cache().stat().st_mode) == 0o644
    assert stat.S_IMODE(fake.cache().parent.stat().st_mode) == 0o755


def test_asked_again_when_the_installation_changes(fake: FakeInstallation) -> None:
    book = fake.book()
    good(book.read(fake.spec()))
    fake.release("0.33.0")
    assert bad(book.known(fake.spec())).stale
    assert good(book.read(fake.spec())).version == "0.33.0"
    (fake.packages / "a_plugin").mkdir()
    good(book.read(fake.spec()))
    fake.says("print(HELP)")
    os.utime(fake.program, (1, 1))
    good(book.read(fake.spec()))
    assert len(fake.asked()) == 4
    assert len(list(fake.cache().parent.iterdir())) == 1


def test_0_9_lists_everything_in_plain_help(fake: FakeInstallation) -> None:
    fake.says('print(HELP if "--help" in sys.argv else "Parameters matching all:\\n  --disable-custom-all-reduce")')
    assert good(fake.book().read(fake.spec())).get("max-num-seqs") is not None
    assert [start["argv"][1] for start in fake.asked()] == ["--help=all", "--help"]


def test_what_it_runs_with(fake: FakeInstallation) -> None:
    base = {"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": "/opt/lib", "HF_TOKEN": "secret-1", "NOTIFY_SOCKET": "/x"}
    spec = fake.spec(env={"VLLM_PLUGINS": "a", "MY_TOKEN": "secret-2", "HF_HUB_OFFLINE": "0"}, gpus=("0",))
    good(fake.book(base).read(spec))
    (start,) = fake.asked()
    env = start["env"]
    assert "secret" not in json.dumps(start)
    assert "NOTIFY_SOCKET" not in env
    assert env.items() >= {**flags_ask.QUIET, "LD_LIBRARY_PATH": "/opt/lib", "VLLM_PLUGINS": "a"}.items()
    assert env["PATH"].split(":")[0] == str(fake.program.parent)
    assert env["HOME"] == own_account().home


@needs_root
@pytest.mark.parametrize("user", ["nobody", "root"])
def test_it_runs_as_the_user_of_the_engine(fake: FakeInstallation, user: str) -> None:
    good(fake.book(as_root=True).read(fake.spec(user=user)))
    assert fake.asked()[0]["uid"] == {"nobody": 65534, "root": 0}[user]
    assert fake.cache().stat().st_uid == 0


@needs_root
def test_a_user_who_does_not_exist(fake: FakeInstallation) -> None:
    assert bad(fake.book(as_root=True).read(fake.spec(user="no-such-user"))).reason.endswith("does not exist")
    assert fake.asked() == []


def test_the_simulated_vllm_tells_its_flags(home: Path) -> None:
    book = FlagBook(home, as_root=False, base_env={"PATH": "/usr/bin:/bin"})
    spec = EngineSpec(name="q", model="m/m", port=1, command=(str(SIM_PATH), "serve"))
    found = good(book.read(spec))
    assert found.version is None
    assert found.get("shutdown-timeout") is not None


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (("{bin}/python3", "-m", "vllm.entrypoints.openai.api_server"), "are known"),
        (("{bin}/vllm", "launch"), "are known"),
        (("{bin}/vllm",), "are known"),
        (("{bin}/start-it", "serve"), "are known"),
        (("{bin}/wrapper/vllm", "serve"), "are known"),
        (("/no/such/vllm", "serve"), "not installed"),
        (("vllm", "serve"), "not installed"),
    ],
)
def test_commands_that_are_not_asked(fake: FakeInstallation, command: tuple[str, ...], reason: str) -> None:
    folder = fake.program.parent
    (folder / "start-it").write_text(fake.program.read_text())
    (folder / "wrapper").mkdir()
    (folder / "wrapper" / "vllm").write_text("#!/bin/bash\nexec docker run vllm\n")
    for program in (folder / "start-it", folder / "wrapper" / "vllm"):
        program.chmod(0o755)
    spec = fake.spec(command=tuple(word.format(bin=folder) for word in command))
    found = bad(fake.book().read(spec))
    assert reason in found.reason
    assert (found.failed, found.stale) == (False, False)
    assert bad(fake.book().known(spec)) == found
    assert fake.asked() == []


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            'print("tr\\x1bap", file=sys.stderr); sys.exit("Error: libcuda\\x1b is missing")',
            "exited with 1: Error: libc",
        ),
        ("os.kill(os.getpid(), 11)", "was killed with 11"),
        ("pass", "does not list them"),
        ("sys.stdout.write('x' * (5 << 20))", "exited with 1: OSError: [Errno 27]"),
        ("a = bytearray(9 << 30)", "exited with 1: MemoryError"),
    ],
)
def test_failures_are_told_and_remembered(fake: FakeInstallation, body: str, reason: str) -> None:
    fake.says(body)
    book = fake.book()
    found = bad(book.read(fake.spec()))
    assert reason in found.reason
    assert found.failed
    assert found.reason.isprintable()
    starts = len(fake.asked())
    assert bad(book.read(fake.spec())) == found == bad(book.known(fake.spec()))
    assert len(fake.asked()) == starts
    fake.says("print(HELP)")
    os.utime(fake.program, (1, 1))
    good(book.read(fake.spec()))


def test_asked_again_after_an_hour(fake: FakeInstallation, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.says("sys.exit(1)")
    book = fake.book()
    bad(book.read(fake.spec()))
    monkeypatch.setattr(flags_module, "RETRY_S", 0.0)
    bad(book.read(fake.spec()))
    assert len(fake.asked()) == 2


def test_who_does_not_answer_is_ended_with_all_that_it_started(fake: FakeInstallation) -> None:
    pids = fake.home / "pids"
    fake.says(f"""child = os.fork()
if child:
    with open({str(pids)!r} + ".new", "w") as file:
        file.write(f"{{os.getpid()}} {{child}}")
    os.rename({str(pids)!r} + ".new", {str(pids)!r})
time.sleep(300)""")
    found = bad(fake.book().read(fake.spec(), timeout_s=3.0))
    assert found.reason.endswith("no answer within 3 s")
    both = [int(pid) for pid in pids.read_text().split()]
    assert len(both) == 2
    wait_until(lambda: not any(map(alive, both)), 10, "both ended")


def test_children_of_one_that_answered_are_ended_too(fake: FakeInstallation) -> None:
    pid = fake.home / "pid"
    fake.says(f"""child = os.fork()
if not child:
    time.sleep(300)
with open({str(pid)!r}, "w") as file:
    file.write(str(child))
print(HELP)""")
    good(fake.book().read(fake.spec()))
    wait_until(lambda: not alive(int(pid.read_text())), 10, "it ended")


def test_a_program_that_cannot_be_started(fake: FakeInstallation) -> None:
    fake.program.chmod(0o644)
    assert "exited with 126" in bad(fake.book().read(fake.spec())).reason


# --- the cache --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"format": 1}',
        b"[" * 100_000,
        b'{"format": 1, "program": 1, "version": 2, "state": 3, "flags": 4}',
        None,
    ],
)
def test_a_broken_cache_is_replaced(fake: FakeInstallation, content: bytes | None) -> None:
    good(fake.book().read(fake.spec()))
    path = fake.cache()
    whole = json.loads(path.read_bytes())
    if content is None:
        shapes: tuple[Any, ...] = ([], {}, {"port": ["port", "much", False, []]}, {"port": 3}, 7)
        for shape in shapes:
            path.write_text(json.dumps({**whole, "flags": shape}))
            assert bad(fake.book().known(fake.spec())).stale
    else:
        path.write_bytes(content)
    good(fake.book().read(fake.spec()))
    assert len(fake.asked()) == 2
    assert json.loads(path.read_bytes()) == whole


def test_links_and_pipes_in_place_of_the_cache(fake: FakeInstallation) -> None:
    good(fake.book().read(fake.spec()))
    path = fake.cache()
    kept = fake.home / "kept"
    path.rename(kept)
    path.symlink_to(kept)
    assert bad(fake.book().known(fake.spec())).stale
    path.unlink()
    os.mkfifo(path)
    assert bad(fake.book().known(fake.spec())).stale


@needs_root
def test_what_a_stranger_wrote_is_not_believed(fake: FakeInstallation) -> None:
    good(fake.book().read(fake.spec()))
    os.chown(fake.cache(), 65534, 65534)
    assert bad(fake.book().known(fake.spec())).stale


def test_without_a_state_directory_it_works_too(fake: FakeInstallation) -> None:
    fake.state_dir.rmdir()
    good(fake.book().read(fake.spec()))
    assert not fake.state_dir.exists()


@needs_root
def test_nothing_is_written_for_the_owner_of_a_foreign_directory(fake: FakeInstallation) -> None:
    os.chown(fake.state_dir, 65534, 65534)
    good(fake.book().read(fake.spec()))
    assert list(fake.state_dir.iterdir()) == []


# --- at a launch ------------------------------------------------------------------------------------------------------


def test_a_launch_asks_nobody(fake: FakeInstallation) -> None:
    book = fake.book()
    assert bad(book.known(fake.spec())).stale
    assert fake.asked() == []
    good(book.read(fake.spec()))
    good(book.known(fake.spec()))
    fake.release("0.33.0")
    assert bad(book.known(fake.spec())).stale
    assert len(fake.asked()) == 1


def test_only_one_read_at_a_time(fake: FakeInstallation) -> None:
    book = fake.book()
    with contextlib.ExitStack() as stack:
        assert book._asking.acquire(timeout=1)
        stack.callback(book._asking.release)
        found = bad(book.read(fake.spec(), timeout_s=0.05))
    assert "another read" in found.reason
    good(book.read(fake.spec()))


def test_a_help_text_of_one_endless_line_is_read_quickly() -> None:
    """As much as is read of a help text; what it prints is up to a program that is not ours."""
    begun = thread_time()
    assert parse_help("  " + "--a, " * 800_000) is None
    assert thread_time() - begun < 10.0
