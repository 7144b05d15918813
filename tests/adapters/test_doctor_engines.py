"""`doctor` on engines, accounts, disks, ports and start times."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from supervisord.core.messages import Record
from supervisord.doctor import places, running
from supervisord.doctor.facts import Unknown
from supervisord.doctor.findings import Verdict
from supervisord.engine import launch_env
from supervisord.history import History
from supervisord.history_store import FILE
from tests.adapters.doctor_box import DOWN, Sick, gpu
from tests.adapters.fake_daemon import FakeDaemon, engine
from tests.adapters.fake_installation import FakeInstallation, open_home

OK, WARN, FAIL, NOT_CHECKED = Verdict.OK, Verdict.WARN, Verdict.FAIL, Verdict.NOT_CHECKED

TORCH = """from typing import Optional
__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'xpu']
__version__ = '{version}'
debug = False
cuda: Optional[str] = {cuda}
git_version = '0000'
hip: Optional[str] = None
"""


class Place:
    """A machine with an installation of vLLM and one engine."""

    def __init__(self, folder: Path) -> None:
        self.box = Sick(folder)
        self.installation = FakeInstallation(folder)
        self.torch("2.8.0+cu128", "'12.8'")
        self.engine()

    def engine(self, lines: str = "", tables: str = "", gpus: str = '"0"', port: int = 8001) -> None:
        self.box.text = f"""
[supervisor]
state_dir = "{self.installation.state_dir}"
[engine.q]
command = ["{self.installation.program}", "serve"]
model = "org/model"
port = {port}
gpus = [{gpus}]
{lines}
{tables}
"""

    def torch(self, version: str, cuda: str) -> None:
        folder = self.installation.packages / "torch"
        folder.mkdir(exist_ok=True)
        (folder / "version.py").write_text(TORCH.format(version=version, cuda=cuda))


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with open_home() as folder:
        yield Place(folder)


# --- vLLM -------------------------------------------------------------------------------------------------------------


def test_an_engine_that_can_be_started(place: Place) -> None:
    verdict, text, _ = place.box.one("engine_start")
    assert verdict is OK
    assert str(place.installation.program) in text
    assert place.box.one("vllm_version") == (OK, "engine q: vLLM 0.32.0", "")
    assert place.installation.asked() == []  # nothing of it was executed


def test_an_engine_without_a_program(place: Place) -> None:
    place.box.text = place.box.text.replace(f'["{place.installation.program}", "serve"]', "[]")
    assert place.box.one("engine_start") == (NOT_CHECKED, "engine q: it names no program", "")
    assert place.box.ask("vllm_version") == place.box.ask("vllm_cuda") == place.box.ask("compiler") == []


def test_no_vllm(place: Place) -> None:
    place.installation.program.unlink()
    verdict, text, remedy = place.box.one("engine_start")
    assert verdict is FAIL
    assert f'cannot find the program "{place.installation.program}"' in text
    assert remedy.startswith("install vLLM")
    assert place.box.one("vllm_version")[0] is NOT_CHECKED
    assert place.box.ask("vllm_cuda") == []


def test_a_program_that_its_user_may_not_execute(place: Place) -> None:
    place.box.as_root = True
    place.box.account("vllm", uid=os.geteuid() + 4242)
    place.installation.program.chmod(0o700)
    verdict, text, remedy = place.box.one("engine_start")
    # The launch plan looks accounts up itself: where this machine has no user vllm it says that instead.
    assert verdict is FAIL
    assert remedy
    assert "vllm" in text


def test_an_old_vllm(place: Place) -> None:
    place.installation.release("0.8.5")
    verdict, text, remedy = place.box.one("vllm_version")
    assert verdict is WARN
    assert "vLLM 0.8.5 is older than 0.9" in text
    assert "install-vllm" in remedy


def test_a_missing_user(place: Place) -> None:
    place.box.as_root = True
    assert place.box.one("engine_start")[0] is NOT_CHECKED
    assert place.box.one("user") == (
        FAIL,
        "there is no user vllm",
        "useradd --system --create-home --home-dir /var/lib/vllm vllm",
    )


def test_a_user_who_may_command_the_supervisor(place: Place) -> None:
    place.box.as_root = True
    place.box.write("/etc/group", f"broken\nvllm-admin:x:{'9' * 5000}:\nvllm-admin:x:999:vllm\n")
    place.box.account("vllm", groups=(999,))
    assert place.box.one("user")[0] is WARN
    assert place.box.one("user")[2] == "gpasswd -d vllm vllm-admin"


@pytest.mark.parametrize(
    ("cuda", "driver", "verdict", "words"),
    [
        ("'12.8'", (13, 0), OK, "torch 2.8.0+cu128 has CUDA 12.8, the driver goes up to 13.0"),
        ("'12.8'", (12, 8), OK, "the driver goes up to 12.8"),
        ("'12.8'", (12, 4), WARN, "kernels that are compiled at run time may fail"),
        ("'13.0'", (12, 8), FAIL, "it cannot begin"),
        ("None", (13, 0), FAIL, "a build without CUDA"),
        (f"'{'9' * 5000}'", (13, 0), FAIL, "a build without CUDA"),
        ("'12.8'", None, NOT_CHECKED, "the driver does not say up to which it goes"),
    ],
)
def test_cuda_of_torch_against_the_driver(
    place: Place, cuda: str, driver: tuple[int, int] | None, verdict: Verdict, words: str
) -> None:
    place.torch("2.8.0+cu128", cuda)
    place.box.cuda = driver
    found, text, remedy = place.box.one("vllm_cuda")
    assert found is verdict
    assert words in text
    assert bool(remedy) is (verdict in {WARN, FAIL})


def test_cuda_that_is_older_than_the_gpu(place: Place) -> None:
    place.box.readings = (gpu(name="NVIDIA GeForce RTX 5090", architecture=10, compute=(12, 0)),)
    place.torch("2.6.0+cu126", "'12.6'")
    verdict, text, _ = place.box.one("vllm_cuda")
    assert verdict is FAIL
    assert "torch 2.6.0+cu126 has CUDA 12.6, and its GPU (compute 12.0) needs 12.8 at least" in text


def test_cuda_where_torch_does_not_say_it(place: Place) -> None:
    (place.installation.packages / "torch" / "version.py").write_text("__version__ = '2.8.0'\n")
    (place.installation.packages / "nvidia_cuda_runtime_cu12-12.8.90.dist-info").mkdir()
    assert place.box.one("vllm_cuda")[:2] == (OK, "engine q: torch 2.8.0 has CUDA 12.8, the driver goes up to 13.0")


def test_forward_compatibility_is_left_to_the_operator(place: Place) -> None:
    place.torch("2.9.0+cu130", "'13.0'")
    place.box.cuda = (12, 8)
    place.engine(tables='[engine.q.env]\nLD_LIBRARY_PATH = "/usr/local/cuda/compat"')
    assert place.box.one("vllm_cuda")[0] is NOT_CHECKED


def test_an_environment_without_torch(place: Place) -> None:
    (place.installation.packages / "torch" / "version.py").unlink()
    assert place.box.one("vllm_cuda")[0] is NOT_CHECKED


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"cuda = 'x'\n", b"cuda: Optional[str] = '12'\n"])
def test_any_torch_gives_a_finding(place: Place, content: bytes) -> None:
    (place.installation.packages / "torch" / "version.py").write_bytes(content)
    assert len(place.box.ask("vllm_cuda")) == 1


def test_no_compiler(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = place.box.folder / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    seen = {finding.verdict: finding for finding in place.box.ask("compiler")}
    assert f"no C compiler in {place.installation.program.parent}:{tools}" in seen[FAIL].message
    assert seen[FAIL].remedy.startswith("apt-get install gcc")
    place.engine(tables="[engine.q.args]\nenforce-eager = true")
    assert FAIL not in {finding.verdict for finding in place.box.ask("compiler")}
    compiler = tools / "gcc"
    compiler.touch()
    compiler.chmod(0o755)
    assert not any("no C compiler" in finding.message for finding in place.box.ask("compiler"))
    place.engine(tables=f'[engine.q.env]\nCC = "{tools}/cc"')
    (found,) = [finding for finding in place.box.ask("compiler") if finding.verdict is FAIL]
    assert f"CC = {tools}/cc cannot be found" in found.message, "nobody looks for another one then"
    place.engine(tables=f'[engine.q.env]\nCC = "{compiler}"')
    assert FAIL not in {finding.verdict for finding in place.box.ask("compiler")}


def test_headers_of_python(place: Place) -> None:
    own = place.box.folder / "python" / "bin" / "python3.11"
    own.parent.mkdir(parents=True)
    own.touch(0o755)
    python = place.installation.program.parent / "python3"
    python.unlink()
    python.symlink_to(own)
    assert any("has no Python.h" in finding.message for finding in place.box.ask("compiler"))
    header = place.box.folder / "python/include/python3.11/Python.h"
    header.parent.mkdir(parents=True)
    header.touch()
    assert not any("Python.h" in finding.message for finding in place.box.ask("compiler"))


def test_flashinfer_compiles_for_blackwell(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_env, "CUDA_BIN", "/nowhere")
    monkeypatch.setenv("PATH", str(place.box.folder))
    (place.installation.packages / "flashinfer").mkdir()
    assert not any("FlashInfer" in finding.message for finding in place.box.ask("compiler"))
    place.box.readings = (gpu(compute=(12, 0)),)
    assert any("FlashInfer compiles" in finding.message for finding in place.box.ask("compiler"))
    (place.installation.packages / "flashinfer_jit_cache").mkdir()
    assert not any("FlashInfer" in finding.message for finding in place.box.ask("compiler"))


# --- accounts, directories, disks -------------------------------------------------------------------------------------


def foreign(place: Place) -> None:
    """Engines of a user who is somebody else."""
    place.box.as_root = True
    place.box.account("vllm", uid=os.geteuid() + 4242)


def test_a_home_that_is_missing_or_cannot_be_written(place: Place) -> None:
    foreign(place)
    place.box.home.chmod(0o755)
    verdict, text, remedy = place.box.one("home")
    assert (verdict, text) == (FAIL, f"user vllm cannot write its home {place.box.home}")
    assert remedy == f"chown vllm {place.box.home}"
    place.box.home.chmod(0o777)
    assert place.box.one("home")[0] is OK
    place.box.home.rmdir()
    assert place.box.one("home") == (
        FAIL,
        f"the home of user vllm, {place.box.home}, is not there: vLLM keeps its caches in it",
        f"install -d -m 0750 -o vllm {place.box.home}",
    )


@pytest.mark.parametrize("home", ["/", "/usr/sbin", "/nonexistent", "/nonexistent/vllm", "/var/lib/not-there-yet"])
def test_no_remedy_gives_away_what_is_not_the_engines_own(place: Place, home: str) -> None:
    """Whoever is paged at night copies it: `chown -R vllm /var/lib` ends the machine."""
    foreign(place)
    place.box.accounts["vllm"] = replace(place.box.accounts["vllm"], home=home)
    shared = place.installation.state_dir.parent / "shared"
    shared.mkdir(mode=0o755)
    place.engine(tables=f'[engine.q.env]\nHF_HOME = "{shared}/models/hub"')
    found = [finding for check in ("home", "caches") for finding in place.box.ask(check)]
    assert FAIL in {finding.verdict for finding in found}
    for finding in found:
        words = finding.remedy.partition(";")[0].split()
        if "chown" in words:
            assert words[-1] in finding.message.split(), "no directory above it"
            assert words[-1] not in {"/", "/usr/sbin", str(shared)}
    remedies = {finding.remedy for finding in found}
    assert f"install -d -o vllm {shared}/models/hub" in remedies


def test_caches_that_cannot_be_written(place: Place) -> None:
    foreign(place)
    place.box.home.chmod(0o777)
    assert place.box.one("caches")[0] is OK
    cache = place.box.home / ".cache" / "vllm"
    cache.mkdir(parents=True, mode=0o755)
    cache.chmod(0o755)
    assert f"user vllm cannot write {cache}" in [finding.message for finding in place.box.ask("caches")]
    place.engine(tables=f'[engine.q.env]\nVLLM_CACHE_ROOT = "{place.box.home}/elsewhere"\nXDG_CACHE_HOME = "{cache}"')
    closed = {finding.message for finding in place.box.ask("caches")}
    assert f"chown -R vllm {cache}" not in {finding.remedy for finding in place.box.ask("caches")}
    assert closed == {f"user vllm cannot write {cache}/huggingface", f"user vllm cannot write {cache}/flashinfer"}


def test_the_state_directory(place: Place) -> None:
    state = place.installation.state_dir
    assert place.box.one("state_dir") == (OK, str(state), "")
    foreign(place)
    state.chmod(0o700)
    if os.geteuid() == 0:
        assert place.box.one("state_dir") == (
            FAIL,
            f"user vllm may not pass {state} to its temporary directory",
            f"chmod 0711 {state}",
        )
        state.chmod(0o711)
        state.parent.chmod(0o700)
        verdict, text, remedy = place.box.one("state_dir")
        assert (verdict, text) == (
            FAIL,
            f"user vllm may not pass {state.parent} to its temporary directory below {state}",
        )
        assert remedy.endswith(f"chmod o+x {state.parent}")
        os.chown(state, 4242, -1)
    assert "and the daemon is root" in place.box.one("state_dir")[1]
    state.rmdir()
    assert place.box.one("state_dir")[0] is OK


class Volume:
    """What statvfs says of a disk."""

    f_frsize = 4096
    f_flag = 0
    f_files = 1000

    def __init__(self, size: int, free: int, inodes: int = 10) -> None:
        self.f_blocks, self.f_bavail, self.f_favail = size // 4096, free // 4096, inodes


@pytest.mark.parametrize(
    ("volume", "verdict", "words"),
    [
        (Volume(100 * places.GIB, 50 * places.GIB), OK, "50.0 of 100 GiB are free"),
        (Volume(100 * places.GIB, 5 * places.GIB), WARN, "5.0 of 100 GiB are free"),
        (Volume(100 * places.GIB, places.MIB), FAIL, "no engine is started below 64 MiB"),
        (Volume(100 * places.GIB, 50 * places.GIB, inodes=0), FAIL, "no inodes are free"),
    ],
)
def test_room(place: Place, monkeypatch: pytest.MonkeyPatch, volume: Volume, verdict: Verdict, words: str) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: volume)
    found = place.box.ask("disk")
    assert {finding.verdict for finding in found} == {verdict}
    assert all(words in finding.message for finding in found)


@pytest.mark.parametrize(
    ("volume", "verdict"),
    [
        (Volume(64 * places.GIB, 60 * places.GIB), OK),
        (Volume(64 * places.GIB, places.MIB), WARN),
        (Volume(64 * places.MIB, 64 * places.MIB), FAIL),
    ],
)
def test_shared_memory(place: Place, monkeypatch: pytest.MonkeyPatch, volume: Volume, verdict: Verdict) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: volume)
    assert place.box.one("shared_memory")[0] is verdict


def test_a_disk_mounted_noexec(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    rigid = Volume(100 * places.GIB, 50 * places.GIB)
    rigid.f_flag = os.ST_NOEXEC
    monkeypatch.setattr(os, "statvfs", lambda _: rigid)
    assert "noexec" in place.box.one("state_dir")[1]
    assert {finding.verdict for finding in place.box.ask("caches")} == {FAIL}
    for finding in (*place.box.ask("state_dir"), *place.box.ask("caches")):
        remount = re.match("mount -o remount,exec ([^ ,]+)", finding.remedy)
        assert remount is not None
        assert os.path.ismount(remount[1]), "mount(8) takes no other directory"


def test_open_files(place: Place) -> None:
    told: dict[str, Any] = {"supervisor": {"launcher": "plain", "pid": 50}, "engines": [], "gpus": []}
    place.box.daemon = told
    place.box.write("/proc/50/limits", "Limit  Soft Limit  Hard Limit  Units\nMax open files  1024  4096  files\n")
    verdict, text, remedy = place.box.one("open_files")
    assert (verdict, text[:34]) == (WARN, "the daemon may have 4096 files ope")
    assert "LimitNOFILE=65536" in remedy
    place.box.write("/proc/50/limits", "Max open files  1024  524288  files\n")
    assert place.box.one("open_files") == (OK, "the daemon may have 524288 files open", "")
    place.box.daemon = {**told, "supervisor": {"launcher": "systemd", "pid": 50}}
    assert place.box.one("open_files")[0] is OK
    place.box.daemon = DOWN
    place.box.unit = {"LoadState": "loaded", "LimitNOFILE": "1024"}
    assert place.box.one("open_files")[1].startswith("the unit may have 1024 files open")


# --- ports and start times --------------------------------------------------------------------------------------------


def test_a_port_names_its_holder(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        place.engine(port=port)
        found = next(finding for finding in place.box.ask("port") if finding.subject == "engine q")
        assert found.verdict is FAIL
        assert f"port {port} of 127.0.0.1: it is held by pid {os.getpid()}" in found.message
        assert found.remedy == "stop that one, or set another port"
        place.box.daemon = Unknown("denied", "denied")
        assert place.box.one("port")[0] is NOT_CHECKED
        for state in ("ready", "starting"):
            told = {"name": "q", "pid": os.getpid(), "state": state}
            place.box.daemon = {"supervisor": {}, "engines": [told], "gpus": []}
            assert place.box.one("port") == (OK, f"engine q: port {port} is the engine's own (pid {os.getpid()})", "")
        place.box.daemon = {
            "supervisor": {},
            "engines": [{"name": "q", "pid": 1 << 30, "state": "starting"}],
            "gpus": [],
        }
        assert place.box.one("port")[0] is FAIL
        place.box.daemon = DOWN
        place.box.process(os.getpid(), "vllm", cgroup="/vllm.slice/vllm-engine-q.service")
        text = f"port {port} is the engine's own (pid {os.getpid()}); it outlives its daemon, the next one adopts it"
        found = next(finding for finding in place.box.ask("port") if finding.subject == "engine q")
        assert (found.verdict, found.message) == (OK, text)
    found = next(finding for finding in place.box.ask("port") if finding.subject == "engine q")
    assert (found.verdict, found.message) == (OK, f"port {port} is free")


def event(kind: str, generation: int = 1, reason: str | None = None, **numbers: float) -> Mapping[str, Any]:
    return {"engine": "q", "kind": kind, "generation": generation, "reason": reason, "numbers": numbers}


def test_start_times_come_from_the_daemon(place: Place) -> None:
    with FakeDaemon(place.box.folder, engine("q")) as daemon:
        place.box.daemon = {"supervisor": {}, "engines": [], "gpus": []}

        def told(*events: Mapping[str, Any]) -> tuple[Verdict, str, str]:
            daemon.told = []
            for one in events:
                daemon.tell(**one)
            facts = replace(place.box.facts(), socket=daemon.socket)
            (finding,) = running.start_times(facts)
            return finding.verdict, finding.message, finding.remedy

        assert told() == (NOT_CHECKED, "no start of it is in the history yet", "")
        known = (OK, "2 starts took 40 to 65 s; start_timeout_s is 600 without progress, 3600 in all", "")
        assert told(event("answering", took_s=40.0), event("answering", 2, took_s=65.0)) == known
        verdict, text, remedy = told(event("answering", took_s=3500.0))
        assert (verdict, remedy) == (WARN, "start_timeout_max_s = 7000")
        assert "ends one after 3600 s" in text
        verdict, text, remedy = told(event("stopping", reason="start_timeout"), event("exited", reason="start_timeout"))
        assert verdict is WARN
        assert text == "start_timeout_s or start_timeout_max_s ended 1 of the last 1 start; none came to an end"
        later = [event("answering", number, took_s=9.0) for number in range(2, 13)]
        assert told(event("stopping", reason="start_timeout"), *later)[0] is OK
        assert "raise start_timeout_s (600)" in remedy
        odd: list[Mapping[str, Any]] = [
            {"engine": "q", "kind": "answering", "numbers": None},
            {"engine": "q", "kind": "answering", "numbers": {"took_s": "long"}},
            event("answering", took_s=1.0),
        ]
        assert told(*odd)[0] is OK


def test_start_times_come_from_the_file_without_a_daemon(place: Place) -> None:
    assert place.box.one("start_time")[0] is NOT_CHECKED
    history = History(place.installation.state_dir, lambda _: None)
    history.record(Record("answering", "q answers", engine="q", generation=1, numbers={"took_s": 42.0}))
    history.close()
    assert "1 start took 42 s" in place.box.one("start_time")[1]
    (place.installation.state_dir / FILE).write_bytes(b"no database" * 1000)
    assert place.box.one("start_time")[0] is NOT_CHECKED
