"""The simulated vLLM shows the behaviours of the real one that the other tests rely on."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sim.engine import (
    DATA_PATH,
    MARKER,
    SIM_PATH,
    Answer,
    Mood,
    SimEngine,
    alive,
    free_port,
    processes_with_marker,
    running,
    sim_command,
    title_of,
    wait_until,
)

Start = Callable[..., SimEngine]

PROMPT = {"prompt": "how are you today", "max_tokens": 4}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start engines with this test's own interpreter; end all of them afterwards."""
    with contextlib.ExitStack() as stack:

        def begin(*args: str, wait: bool = True, **mood: Any) -> SimEngine:
            env = mood.pop("env", {})
            folder = tmp_path / str(len(list(tmp_path.iterdir())))
            folder.mkdir()
            engine = stack.enter_context(running(folder, *args, mood=mood, env=env, python=sys.executable))
            return engine.wait_ready() if wait else engine

        yield begin


def run_sim(*args: str, mood: Mood | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", **(mood.env if mood else {}), **env}
    return subprocess.run(
        [*sim_command(sys.executable)[:-1], *args],
        env=environment,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


def in_background(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run a call that may hang; its result or its exception ends in the list."""
    results: list[Any] = []

    def target() -> None:
        try:
            results.append(call())
        except Exception as error:  # noqa: BLE001 (handed to the test)
            results.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread, results


class Stream:
    """A streamed completion that the test reads at its own pace."""

    def __init__(self, engine: SimEngine, **body: Any) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=5)
        payload = {"prompt": "tell me a story", "stream": True, "ignore_eos": True, **body}
        headers = {"Content-Type": "application/json"}
        self.connection.request("POST", "/v1/completions", json.dumps(payload), headers)
        self.response = self.connection.getresponse()

    def event(self) -> str:
        line = b""
        while not line.startswith(b"data: "):
            line = self.response.readline()
            assert line, "the stream ended"
        return line[6:].decode().strip()

    def rest(self) -> str:
        return self.response.read().decode()

    def close(self) -> None:
        self.response.close()
        self.connection.close()


# the command line


def test_it_is_a_command_of_its_own() -> None:
    answer = subprocess.run([SIM_PATH, "--version"], capture_output=True, text=True, timeout=20, check=True)
    assert answer.stdout == "0.32.0\n"


def test_version_and_help() -> None:
    assert run_sim("--version", VLLM_SIM_VERSION="0.18.1").stdout == "0.18.1\n"
    text = (DATA_PATH / "help-all-0.32.0.txt").read_text()
    assert run_sim("serve", "--help=all").stdout == text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--no-such-flag"], "vllm: error: unrecognized arguments: --no-such-flag"),
        (
            ["--speculative-model", "x", "--num-speculative-tokens", "3"],
            "vllm: error: unrecognized arguments: --speculative-model x --num-speculative-tokens 3",
        ),
        (
            ["--max-model-len", "abc"],
            "argument --max-model-len: invalid human_readable_int_or_auto value: 'abc'",
        ),
        (["--kv-cache-dtype=fp17"], "argument --kv-cache-dtype: invalid choice: 'fp17' (choose"),
        (["--port"], "argument --port: expected one argument"),
    ],
)
def test_argument_errors_exit_2(args: list[str], message: str) -> None:
    answer = run_sim("serve", "tiny", *args)
    assert answer.returncode == 2
    assert message in answer.stderr
    assert answer.stdout == ""


def test_real_flags_are_taken_in_every_form(start: Start) -> None:
    engine = start(
        "--served-model-name", "a", "b", "--max_model_len=4k", "--enforce-eager",
        "--no-enable-prefix-caching", "--compilation-config.mode", "3", "-tp", "1",
        "--speculative-config", '{"method": "ngram"}',
    )  # fmt: skip
    models = engine.get("/v1/models").json["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [("a", 4000), ("b", 4000)]


def test_flags_can_be_rejected_as_by_another_release(tmp_path: Path) -> None:
    mood = Mood(tmp_path / "mood", reject_flags=["--shutdown-timeout"])
    answer = run_sim("serve", "tiny", "--shutdown-timeout", "30", mood=mood)
    assert (answer.returncode, answer.stderr.splitlines()[-1]) == (
        2,
        "vllm: error: unrecognized arguments: --shutdown-timeout 30",
    )


def test_a_mood_that_cannot_be_obeyed_is_loud(tmp_path: Path, start: Start) -> None:
    answer = run_sim("serve", "tiny", mood=Mood(tmp_path / "mood", helth=503))
    assert answer.returncode == 70
    assert "unknown key 'helth'" in answer.stderr
    engine = start()
    engine.mood.patch(freeze="yes", stop_busy="later", spam={"linse": 1})
    assert engine.wait_exit() == 70
    assert engine.output().count("cannot obey mood") == 3
    assert engine.processes() == []


# start


@pytest.mark.parametrize(
    ("capture", "code", "text"),
    [
        ("badflag", 2, "unrecognized arguments"),
        ("port_in_use", 1, "[Errno 98] Address already in use"),
        ("maxlen_gt_kv", 1, "To serve at least one request with the model's max seq len"),
        ("missing_dir", 1, "HFValidationError"),
    ],
)
def test_captured_start_failures(tmp_path: Path, capture: str, code: int, text: str) -> None:
    answer = run_sim("serve", "x", mood=Mood(tmp_path / "mood", start_error={"capture": capture, "after_s": 0.1}))
    assert answer.returncode == code
    assert text in answer.stdout + answer.stderr


def test_own_start_failure_while_a_file_exists(tmp_path: Path, start: Start) -> None:
    poison = tmp_path / "poison"
    poison.touch()
    said = {"line": "RuntimeError: bad cache", "code": 3, "while_exists": str(poison)}
    answer = run_sim("serve", "x", mood=Mood(tmp_path / "mood", start_error=said))
    assert (answer.returncode, answer.stderr) == (3, "RuntimeError: bad cache\n")
    poison.unlink()
    start(start_error=said)


def test_refused_until_ready_with_lines_on_the_way(start: Start) -> None:
    began = time.monotonic()
    engine = start(wait=False, ready_delay_s=0.5, start_lines=["one", "two"])
    wait_until(lambda: "one" in engine.output(), 5, "the first line")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", engine.port))
    engine.wait_ready()
    assert time.monotonic() - began >= 0.5
    assert "two" in engine.output()
    assert "INFO:     Application startup complete." in engine.output()


def test_start_lines_of_a_real_start(start: Start) -> None:
    output = start(start_lines="start-to-ready").output()
    assert "Loading weights took" in output
    assert '"GET /health HTTP/1.1" 200 OK' not in output.partition("startup complete")[0]
    assert "(EngineCore pid=" in start(start_lines="cuda-0.24/start-warm-caches").output()


def test_a_taken_port_ends_the_start(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        answer = run_sim("serve", "tiny", "--port", str(holder.getsockname()[1]), "--host=0.0.0.0")
    assert answer.returncode == 1
    assert answer.stderr.endswith("OSError: [Errno 98] Address already in use\n")


def test_reuse_port_lets_a_stranger_listen_too(start: Start) -> None:
    engine = start(reuse_port=True)
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        stranger.bind(("127.0.0.1", engine.port))
        stranger.listen()


def test_sigterm_before_the_engine_core_ends_it(start: Start) -> None:
    engine = start(wait=False, imports_s=30)
    wait_until(lambda: title_comm(engine.pid) == "vllm", 5, "the process to begin")
    engine.terminate()
    assert engine.wait_exit() == -signal.SIGTERM


def test_sigterm_while_loading_is_swallowed_once(start: Start) -> None:
    engine = start(wait=False, ready_delay_s=30)
    wait_until(lambda: len(engine.processes()) == 4, 5, "the tree")
    wait_until(lambda: "init engine" in engine.output() or engine.output(), 5, "output")
    time.sleep(0.1)
    engine.terminate()
    time.sleep(0.2)
    engine.terminate()  # too early to count
    time.sleep(1.85)
    assert engine.process.poll() is None
    engine.terminate()
    assert engine.wait_exit() == 1
    wait_until(lambda: not engine.processes(), 5, "the tree to end")


def test_a_swallowed_sigterm_leaves_a_serving_engine(start: Start) -> None:
    engine = start(wait=False, ready_delay_s=0.6)
    wait_until(lambda: len(engine.processes()) == 4, 5, "the tree")
    engine.terminate()
    engine.wait_ready()
    assert engine.post("/v1/completions", PROMPT).status == 200


def test_first_on_path_as_vllm(tmp_path: Path) -> None:
    (tmp_path / "vllm").symlink_to(SIM_PATH)
    answer = subprocess.run(
        ["vllm", "serve", "--help=all"],
        env={"PATH": f"{tmp_path}:/usr/bin"},
        capture_output=True,
        timeout=20,
        check=True,
    )
    assert answer.stdout.startswith(b"usage: vllm serve")


def test_it_lives_on_when_nobody_reads_its_log(tmp_path: Path) -> None:
    port, marker = free_port(), "unread" + tmp_path.name
    process = subprocess.Popen(
        [*sim_command(sys.executable), "tiny", "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={MARKER: marker, "VLLM_SIM_MAX_LIFE_S": "30", "VLLM_SIM_SHM_DIR": str(tmp_path)},
        start_new_session=True,
    )
    engine = SimEngine(process, port, Mood(tmp_path / "mood"), marker, tmp_path / "log")
    try:
        assert process.stdout is not None
        process.stdout.close()
        (tmp_path / "log").touch()
        engine.wait_ready()
        os.kill(engine.pid_of("VLLM::Worker"), signal.SIGKILL)
        wait_until(lambda: engine.health() == 503, 5, "/health 503")
    finally:
        engine.destroy()


def test_starts_are_recorded(tmp_path: Path, start: Start) -> None:
    record = tmp_path / "record"
    env = {"VLLM_SIM_RECORD": str(record), "CUDA_VISIBLE_DEVICES": "3"}
    engine = start("--max-num-seqs", "8", env=env)
    line = json.loads(record.read_text())
    assert (line["pid"], line["args"][-2:]) == (engine.pid, ["--max-num-seqs", "8"])
    assert line["env"]["CUDA_VISIBLE_DEVICES"] == "3"


# processes


def title_comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def test_the_tree_looks_like_vllm(start: Start) -> None:
    engine = start("--tensor-parallel-size", "2")
    pids = engine.processes()
    titles = {title_of(pid): pid for pid in pids if pid != engine.pid}
    tracker = next(title for title in titles if "resource_tracker" in title)
    core = titles["VLLM::EngineCore"]
    assert set(titles) == {tracker, "VLLM::EngineCore", "VLLM::Worker_TP0", "VLLM::Worker_TP1"}
    assert title_comm(core) == "VLLM::EngineCor"
    assert title_comm(engine.pid) == "vllm"
    assert "serve tiny --host 127.0.0.1" in title_of(engine.pid)
    assert {os.getsid(pid) for pid in pids} == {os.getpgid(pid) for pid in pids} == {engine.pid}
    parents = {title: Path(f"/proc/{pid}/stat").read_text() for title, pid in titles.items()}
    assert {int(stat.rpartition(")")[2].split()[1]) for stat in parents.values()} == {
        engine.pid,
        core,
    }


def test_one_process_on_request(start: Start) -> None:
    engine = start(children=False)
    assert engine.processes() == [engine.pid]
    assert engine.post("/v1/completions", PROMPT).json["usage"]["completion_tokens"] == 4
    engine.mood.patch(freeze=True)
    thread, results = in_background(lambda: engine.post("/v1/completions", PROMPT))
    thread.join(0.5)
    assert not results
    engine.mood.clear("freeze")
    thread.join(5)
    assert results[0].status == 200
    engine.terminate()
    assert engine.wait_exit() == 0


def test_sigkill_of_the_api_server_orphans_the_rest(start: Start) -> None:
    engine = start()
    core, worker = engine.pid_of("VLLM::EngineCore"), engine.pid_of("VLLM::Worker")
    os.kill(engine.pid, signal.SIGKILL)
    assert engine.wait_exit() == -signal.SIGKILL
    time.sleep(0.2)
    assert alive(core)
    assert alive(worker)
    with socket.create_server(("127.0.0.1", engine.port)):
        pass  # the port is free at once
    os.kill(core, signal.SIGTERM)
    wait_until(lambda: not engine.processes(), 5, "the orphans to end")


def test_orphans_can_be_switched_off(start: Start) -> None:
    engine = start(orphans=False)
    os.kill(engine.pid, signal.SIGKILL)
    wait_until(lambda: not engine.processes(), 5, "the children to end")


@pytest.mark.parametrize("victim", ["VLLM::EngineCore", "VLLM::Worker"])
def test_a_dead_engine_is_503_then_exit_0(start: Start, victim: str) -> None:
    engine = start(dead_503_s=0.4)
    stream = Stream(engine, max_tokens=20000)
    stream.event()
    os.kill(engine.pid_of(victim), signal.SIGKILL)
    wait_until(lambda: engine.health() == 503, 2, "/health 503")
    assert "EngineCore encountered an issue" in stream.rest()
    stream.close()
    assert engine.post("/v1/completions", PROMPT).status == 500
    assert engine.wait_exit() == 0
    assert "EngineDeadError" in engine.output()
    wait_until(lambda: not engine.processes(), 5, "the tree to end")


@pytest.mark.parametrize("victim", ["VLLM::EngineCore", "VLLM::Worker"])
def test_a_stopped_engine_still_looks_healthy(start: Start, victim: str) -> None:
    engine = start()
    stream = Stream(engine, max_tokens=20000)
    stream.event()
    pid = engine.pid_of(victim)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.1)
    before = engine.metric("vllm:generation_tokens_total")
    thread, results = in_background(lambda: engine.post("/v1/completions", PROMPT))
    time.sleep(0.2)
    assert not results
    assert engine.health() == 200
    assert engine.metric("vllm:generation_tokens_total") == before > 0
    assert engine.metric("vllm:num_requests_running") == 1
    os.kill(pid, signal.SIGCONT)
    thread.join(5)
    assert results[0].status == 200
    stream.close()


def test_a_child_can_escape_the_session(start: Start) -> None:
    engine = start(escape=True)
    escaped = wait_until(lambda: [pid for pid in engine.processes() if title_of(pid) == "vllm-escaped"], 5, "escape")[0]
    assert os.getsid(escaped) != engine.pid
    os.killpg(engine.pid, signal.SIGKILL)
    wait_until(lambda: engine.processes() == [escaped], 5, "the group to die")


@pytest.mark.parametrize(
    ("said", "code"),
    [({"code": 7}, 7), ({"signal": "SIGSEGV"}, -11), ({"process": "engine"}, 0)],
)
def test_exit_on_request(start: Start, said: dict[str, Any], code: int) -> None:
    engine = start(dead_503_s=0)
    engine.mood.patch(exit={"after_s": 0.1, **said})
    assert engine.wait_exit() == code


def test_every_process_has_an_end(start: Start) -> None:
    engine = start(env={"VLLM_SIM_MAX_LIFE_S": "4"})  # long enough to be ready on a busy machine
    os.kill(engine.pid_of("VLLM::Worker"), signal.SIGSTOP)  # does not see its alarm
    assert engine.wait_exit() == -signal.SIGALRM
    wait_until(lambda: not engine.processes(), 20, "the whole tree to end")


# stop


def test_idle_stop(start: Start, tmp_path: Path) -> None:
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    engine = start(env={"TMPDIR": str(tmp)})
    shm = engine.log.parent / "shm"
    assert sorted(path.name[:4] for path in shm.iterdir()) == ["psm_", "sem."]
    assert str(shm) in Path(f"/proc/{engine.pid}/maps").read_text()
    began = time.monotonic()
    engine.terminate()
    assert engine.wait_exit() == 0
    assert time.monotonic() - began < 20
    wait_until(lambda: not engine.processes(), 5, "the tree to end")
    assert list(shm.iterdir()) == []
    assert len(list(tmp.iterdir())) == 2  # a socket and vllm_dist_*, also after a clean exit


def test_sigkill_of_the_group_leaks_shared_memory(start: Start) -> None:
    engine = start()
    os.killpg(engine.pid, signal.SIGKILL)
    wait_until(lambda: not engine.processes(), 5, "the group to die")
    assert len(list((engine.log.parent / "shm").iterdir())) == 2


def test_stop_hangs_on_open_streams(start: Start) -> None:
    engine = start()
    stream = Stream(engine, max_tokens=20000)
    stream.event()
    engine.terminate()
    wait_until(lambda: engine.health() is None, 2, "the port to close")
    wait_until(lambda: len(engine.processes()) == 2, 2, "the engine core to go")
    engine.terminate()
    time.sleep(0.3)
    assert engine.process.poll() is None
    stream.close()  # as soon as its clients have gone, it goes too
    assert engine.wait_exit(2) == 0


def test_newer_releases_abort_their_streams(start: Start) -> None:
    engine = start(stop_busy="abort")
    stream = Stream(engine, max_tokens=20000)
    stream.event()
    engine.terminate()
    assert '"finish_reason":"abort"' in stream.rest()
    stream.close()
    assert engine.wait_exit(2) == 0


def test_shutdown_timeout_lets_streams_finish(start: Start) -> None:
    engine = start("--shutdown-timeout", "10")
    stream = Stream(engine, max_tokens=200)
    stream.event()
    engine.terminate()
    wait_until(lambda: engine.post("/v1/completions", PROMPT).status == 500, 2, "refusal of work")
    assert engine.health() == 200
    assert stream.rest().endswith("data: [DONE]\n\n")
    stream.close()
    assert engine.wait_exit(3) == 0


def test_shutdown_timeout_exceeded_hangs(start: Start) -> None:
    engine = start("--shutdown-timeout=1", tokens_per_s=5)
    stream = Stream(engine, max_tokens=1000)
    engine.terminate()
    wait_until(lambda: engine.health() is None, 3, "the timeout")
    time.sleep(0.2)
    assert engine.process.poll() is None
    stream.close()


def test_shutdown_timeout_with_nothing_in_flight(start: Start) -> None:
    engine = start("--shutdown-timeout=30", drain_idle_s=0.3)
    began = time.monotonic()
    engine.terminate()
    assert engine.wait_exit(5) == 0
    assert time.monotonic() - began >= 0.3


def test_sigterm_can_be_ignored(start: Start) -> None:
    parent = start(ignore_sigterm="parent")
    parent.terminate()
    children = start(ignore_sigterm="children")
    children.terminate()
    assert children.wait_exit() == 0
    assert len(children.processes()) == 3
    core = children.pid_of("VLLM::EngineCore")
    os.kill(core, signal.SIGTERM)
    time.sleep(0.2)
    assert alive(core)
    assert parent.health() == 200


# answers


def test_health_says_what_it_is_told(start: Start) -> None:
    engine = start()
    assert (engine.get("/health").status, engine.get("/health").body) == (200, b"")
    assert engine.get("/health").headers["server"] == "uvicorn"
    for status in (503, 500):
        engine.mood.set(health=status)
        assert engine.health() == status
    engine.mood.set(health={"json": {"block_table_stats": {"free_blocks": 99}}})
    assert engine.get("/health").json["block_table_stats"]["free_blocks"] == 99
    engine.mood.set(health_delay_s=0.3)
    began = time.monotonic()
    assert engine.health() == 200
    assert time.monotonic() - began >= 0.3
    assert engine.get("/ping").status == 200
    assert engine.get("/nothing").status == 404
    assert engine.get("/v1/completions").status == 405
    assert engine.get("/version").json == {"version": "0.32.0"}


@pytest.mark.parametrize(
    ("name", "path"),
    [("health", "/health"), ("metrics", "/metrics"), ("models", "/v1/models")],
)
def test_endpoints_hang_apart(start: Start, name: str, path: str) -> None:
    engine = start(wait=False, hang=[name])
    wait_until(lambda: "startup complete" in engine.output(), 5, "the engine to start")
    wait_until(lambda: listens(engine.port), 5, "the port")
    with pytest.raises(TimeoutError):
        engine.get(path, timeout_s=0.2)
    assert engine.get("/version").status == 200
    others = {"/health", "/metrics", "/v1/models"} - {path}
    assert {engine.get(other).status for other in others} == {200}


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def test_drip_feeds_single_bytes(start: Start) -> None:
    engine = start()
    engine.mood.set(drip={"bytes": 40, "interval_s": 0.1, "on": ["/health"]})
    began = time.monotonic()
    assert engine.health() == 200
    assert time.monotonic() - began >= 0.2
    assert engine.get("/metrics", timeout_s=1).status == 200


def test_idle_connections_close_after_keep_alive(start: Start) -> None:
    engine = start(keep_alive_s=0.3)
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=5)
    for _ in range(3):
        connection.request("GET", "/health")
        connection.getresponse().read()
        time.sleep(0.1)
    assert connection.sock is not None
    assert connection.sock.recv(1) == b""
    connection.close()


def test_api_key_guards_only_v1(start: Start) -> None:
    engine = start(env={"VLLM_API_KEY": "k"})
    assert engine.get("/v1/models").status == 401
    assert engine.get("/v1/models", headers={"Authorization": "Bearer k"}).status == 200
    assert engine.post("/v1/completions", PROMPT).status == 401
    assert {engine.get(path).status for path in ("/health", "/metrics", "/load")} == {200}


def test_access_log_can_be_muted(start: Start) -> None:
    engine = start("--disable-access-log-for-endpoints", "/health,/metrics")
    engine.get("/health")
    engine.get("/version")
    assert "GET /health" not in engine.output()
    assert '"GET /version HTTP/1.1" 200 OK' in engine.output()


# the metrics page


def test_captured_pages_verbatim(start: Start) -> None:
    engine = start(metrics="idle-cpu-0.14.1")
    page = (DATA_PATH / "metrics" / "idle-cpu-0.14.1.txt").read_text()
    assert engine.get("/metrics").text == page
    engine.mood.set(metrics="cuda-0.24/busy")
    assert engine.get("/metrics").text == (DATA_PATH / "cuda-0.24" / "busy.txt").read_text()


def test_the_live_page_is_the_captured_one_with_live_numbers(start: Start) -> None:
    engine = start("--num-gpu-blocks-override", "200", "--block-size", "32")
    page, captured = engine.get("/metrics").text, (DATA_PATH / "metrics" / "idle.txt").read_text()
    live = [line.rpartition(" ")[0].replace("block_size", "") for line in page.splitlines()]
    assert len(live) == len(captured.splitlines())
    assert 'num_gpu_blocks="200"' in page
    assert 'kv_cache_size_tokens="6400"' in page
    engine.post("/v1/completions", {"prompt": [5] * 100, "max_tokens": 7, "ignore_eos": True})
    engine.get("/health")
    assert engine.metric("vllm:prompt_tokens_total") == 100
    assert engine.metric("vllm:generation_tokens_total") == 7
    assert engine.metric("vllm:iteration_tokens_total_count") == 7
    assert engine.metric("vllm:time_to_first_token_seconds_count") == 1
    assert engine.metric('vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf"') == 1
    assert engine.metric("vllm:inter_token_latency_seconds_count") == 6
    success = 'vllm:request_success_total{engine="0",finished_reason="length"'
    assert engine.metric(success) == 1
    assert engine.metric("vllm:kv_cache_usage_perc") == 0


def test_numbers_can_be_forged(start: Start) -> None:
    engine = start(
        gauges={"vllm:num_requests_waiting": 6},
        counters={'vllm:prompt_tokens_total{engine="0"}': 12},
        rates={"vllm:generation_tokens_total": 1000},
        blocks="118",
        free_blocks=50,
        rename={"vllm:kv_cache_usage_perc": "vllm:gpu_cache_usage_perc"},
        drop=["vllm:num_preemptions_total"],
    )
    assert engine.metric("vllm:num_requests_waiting") == 6
    assert engine.metric("vllm:prompt_tokens_total") == 12
    assert engine.metric("vllm:gpu_cache_usage_perc") == pytest.approx(1 - 50 / 117)
    assert 0 < engine.metric("vllm:generation_tokens_total") < 20000
    page = engine.get("/metrics").text
    assert 'num_gpu_blocks="118"' in page
    assert "vllm:kv_cache_usage_perc" not in page
    assert "vllm:num_preemptions_total" not in page
    engine.mood.set(blocks="None")
    assert 'num_gpu_blocks="None"' in engine.get("/metrics").text


def test_stale_free_blocks_recover_with_a_step(start: Start) -> None:
    engine = start(free_blocks={"value": 3, "until_step": True})
    assert engine.metric("vllm:kv_cache_usage_perc") > 0.99
    engine.post("/v1/completions", PROMPT)
    assert engine.metric("vllm:kv_cache_usage_perc") == 0


def test_pages_that_nobody_should_believe(start: Start) -> None:
    engine = start(garbage_page="html")
    assert engine.get("/metrics").text.startswith("<html>")
    engine.mood.set(garbage_page=True)
    assert b"\xff\x00" in engine.get("/metrics").body
    engine.mood.set(garbage_page="control")
    assert "\x1b[31m" in engine.get("/metrics").text
    engine.mood.set(huge_mib=8)
    assert len(engine.get("/metrics").body) > 8 * 2**20
    engine.mood.set(metrics=500)
    assert engine.get("/metrics").status == 500


def test_data_parallel_ranks(start: Start) -> None:
    engine = start(engines=2, tokens_per_s=100)
    page = engine.get("/metrics").text
    assert 'num_gpu_blocks="32768"' in page  # the sum over the ranks
    streams = [Stream(engine, max_tokens=1000) for _ in range(2)]
    for stream in streams:
        stream.event()
    series = 'vllm:num_requests_running{engine="%d"'
    assert [engine.metric(series % rank) for rank in (0, 1)] == [1, 1]
    engine.mood.patch(freeze=[1])
    counter = 'vllm:iteration_tokens_total_count{engine="%d"'
    time.sleep(0.4)
    before = [engine.metric(counter % rank) for rank in (0, 1)]
    time.sleep(0.1)
    after = [engine.metric(counter % rank) for rank in (0, 1)]
    assert after[0] > before[0]
    assert after[1] == before[1] > 0
    for stream in streams:
        stream.close()


def test_log_stats_can_be_off(start: Start) -> None:
    assert "vllm:" not in start("--disable-log-stats").get("/metrics").text


# work


def test_completions_plain_streamed_and_chat(start: Start) -> None:
    engine = start()
    plain = engine.post("/v1/completions", {**PROMPT, "max_tokens": 9}).json
    assert len(plain["choices"][0]["text"].split()) == 9
    assert plain["choices"][0]["finish_reason"] == "length"
    stream = Stream(engine, max_tokens=3, stream_options={"include_usage": True})
    events = [json.loads(stream.event()) for _ in range(4)]
    assert [event["choices"][0]["text"].strip() != "" for event in events[:3]] == [True] * 3
    assert events[3]["usage"]["completion_tokens"] == 3
    assert stream.event() == "[DONE]"
    stream.close()
    chat = engine.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).json
    assert chat["choices"][0]["message"]["role"] == "assistant"
    count = engine.post("/tokenize", {"prompt": "abcdefgh"}).json["count"]
    assert count == plain["usage"]["prompt_tokens"] - 3 == 2


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({**PROMPT, "model": "other"}, 404, "The model `other` does not exist."),
        ({"prompt": [1] * 60, "max_tokens": 10}, 400, "maximum context length is 64 tokens"),
        ({"prompt": 5}, 400, "one prompt"),
        ([], 400, "valid dictionary"),
    ],
)
def test_bad_requests(start: Start, body: Any, status: int, text: str) -> None:
    answer = start("--max-model-len", "64").post("/v1/completions", body)
    assert (answer.status, text in answer.json["error"]["message"]) == (status, True)


def test_completions_in_every_mood(start: Start) -> None:
    engine = start(completion="garbage")

    def text() -> str:
        answer: str = engine.post("/v1/completions", PROMPT).json["choices"][0]["text"]
        return answer

    assert text() == "!!!!"
    engine.mood.set(completion="empty")
    assert text() == ""
    engine.mood.set(completion=429)
    assert engine.post("/v1/completions", PROMPT).status == 429
    engine.mood.set(completion_delay_s=0.3)
    began = time.monotonic()
    assert text() != ""
    assert time.monotonic() - began >= 0.3
    engine.mood.set(completion="hang")
    with pytest.raises(TimeoutError):
        engine.post("/v1/completions", PROMPT, timeout_s=0.2)
    assert engine.metric("vllm:num_requests_running") == 0
    stream = Stream(engine, max_tokens=3)  # headers, and then no byte
    assert stream.response.status == 200
    stream.close()


def test_new_shapes_are_slow_until_warm(start: Start) -> None:
    engine = start(first_delay_s=0.3)

    def seconds(tokens: int, seed: int) -> float:
        began = time.monotonic()
        engine.post("/v1/completions", {"prompt": [seed] * tokens, "max_tokens": 1})
        return time.monotonic() - began

    assert seconds(100, 1) >= 0.3
    assert seconds(120, 2) < 0.3
    assert seconds(512, 3) >= 0.3
    assert seconds(513, 4) < 0.3


def test_prefix_cache_skips_the_prefill(start: Start) -> None:
    engine = start()
    for _ in range(2):
        engine.post("/v1/completions", {"prompt": list(range(160)), "max_tokens": 1})
    assert engine.metric("vllm:prefix_cache_queries_total") == 320
    assert engine.metric("vllm:prefix_cache_hits_total") == 144
    assert engine.metric("vllm:prompt_tokens_total") == 176


def test_freeze_and_thaw_while_it_runs(start: Start) -> None:
    engine = start()
    engine.mood.patch(freeze=True)
    time.sleep(0.05)
    assert engine.health() == 200  # the mood is read at each request
    thread, results = in_background(lambda: engine.post("/v1/completions", PROMPT))
    thread.join(0.3)
    assert not results
    assert engine.metric("vllm:iteration_tokens_total_count") == 0
    engine.mood.clear()
    thread.join(5)
    assert isinstance(results[0], Answer)
    assert results[0].status == 200


def test_a_scheduler_that_admits_nothing(start: Start) -> None:
    engine = start(admit=False)
    stream = Stream(engine, max_tokens=3)
    wait_until(lambda: engine.metric("vllm:num_requests_waiting") == 1, 2, "a waiting request")
    assert engine.metric("vllm:num_requests_running") == 0
    assert engine.metric("vllm:iteration_tokens_total_count") == 0
    stream.close()


def test_gauges_are_stale_after_an_abort(start: Start) -> None:
    engine = start(wedge_on_abort=True)
    stream = Stream(engine, max_tokens=20000)
    stream.event()
    stream.close()
    time.sleep(0.1)
    assert engine.metric("vllm:num_requests_running") == 1
    thread, results = in_background(lambda: engine.post("/v1/completions", PROMPT))
    thread.join(0.2)
    assert not results  # wedged by the abort
    engine.mood.clear()
    thread.join(5)
    assert results[0].status == 200
    assert engine.metric("vllm:num_requests_running") == 0


def test_saturation_preempts_and_everybody_finishes(start: Start) -> None:
    # So slow that all of them are under way at once, also where threads wait for a processor.
    engine = start("--block-size=16", "--num-gpu-blocks-override=41", "--max-num-seqs=16", tokens_per_s=300)
    body = {"prompt": "saturate", "max_tokens": 150, "ignore_eos": True}
    calls = [in_background(lambda: engine.post("/v1/completions", body)) for _ in range(12)]
    for thread, _ in calls:
        thread.join(20)
    assert [results[0].status for _, results in calls] == [200] * 12
    assert engine.metric("vllm:num_preemptions_total") > 0
    assert engine.metric("vllm:kv_cache_usage_perc") == 0
    assert engine.metric("vllm:generation_tokens_total") == 1800


def test_a_sleeping_engine_is_healthy_and_hangs(start: Start) -> None:
    engine = start(asleep=1)
    assert engine.health() == 200
    awake = 'vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="awake"}'
    assert engine.metric(awake) == 0
    with pytest.raises(TimeoutError):
        engine.post("/v1/completions", PROMPT, timeout_s=0.2)


# the machine


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def test_host_memory(start: Start) -> None:
    engine = start(allocate_mib=30)
    core = engine.pid_of("VLLM::EngineCore")
    before = resident_mib(core)
    assert before > 30
    engine.mood.patch(leak_mib_per_s=100)
    wait_until(lambda: resident_mib(core) > before + 20, 5, "the leak")


def test_spam(start: Start) -> None:
    engine = start(spam={"lines_per_s": 2000, "line": "No available shared memory broadcast"})
    wait_until(lambda: engine.output().count("No available shared") > 200, 5, "the lines")


def test_gpu_memory_is_told_and_given_back(start: Start, tmp_path: Path) -> None:
    env = {"VLLM_SIM_GPU_DIR": str(tmp_path / "gpus"), "CUDA_VISIBLE_DEVICES": "1"}
    engine = start(env=env, gpu_mib=100)
    told = tmp_path / "gpus/gpu1/procs" / str(engine.pid_of("VLLM::EngineCore"))
    assert told.read_text() == f"{100 * 2**20}\n"
    engine.mood.patch(gpu_mib=150)
    wait_until(lambda: told.read_text() == f"{150 * 2**20}\n", 5, "the new value")
    engine.terminate()
    assert engine.wait_exit() == 0
    assert not told.exists()


def test_gpu_memory_can_outlive_its_process(start: Start, tmp_path: Path) -> None:
    gpus = tmp_path / "gpus"
    env = {"VLLM_SIM_GPU_DIR": str(gpus), "CUDA_VISIBLE_DEVICES": "0,1"}
    engine = start("-tp", "2", env=env, gpu_release_delay_s=1)
    told = [gpus / f"gpu{number}/procs" / str(engine.pid_of(f"VLLM::Worker_TP{number}")) for number in (0, 1)]
    assert all(path.exists() for path in told)
    os.killpg(engine.pid, signal.SIGKILL)
    wait_until(lambda: not engine.processes(), 5, "the group to die")
    assert all(path.exists() for path in told)
    wait_until(lambda: not any(path.exists() for path in told), 5, "the memory to come back")


# figures


def test_it_starts_and_answers_fast(start: Start) -> None:
    starts = []
    for _ in range(3):
        began = time.monotonic()
        engine = start()
        starts.append(time.monotonic() - began)
    assert min(starts) < 0.5  # 35 ms on a quiet machine
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=5)
    times = []
    for _ in range(50):
        began = time.monotonic()
        connection.request("GET", "/health")
        connection.getresponse().read()
        times.append(time.monotonic() - began)
    connection.close()
    assert min(times) < 0.001


def test_helpers(tmp_path: Path) -> None:
    assert processes_with_marker(MARKER, "nobody") == []
    with socket.create_server(("127.0.0.1", free_port())):
        pass
    with pytest.raises(AssertionError, match=r"waited 0.02 s for: a miracle"):
        wait_until(lambda: False, 0.02, "a miracle")
    assert tmp_path.exists()
