"""A real Prometheus scrapes the real daemon: its page, the rules and the dashboard that are shipped."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.daemon.harness import DEADLINE_S, Daemon
from tests.daemon.sims import Sim, section
from tests.sim.engine import free_port, http, wait_until
from tests.sim.nvml import NvmlBox

REPO = Path(__file__).resolve().parents[2]
RULES = REPO / "packaging/prometheus/vllm-supervisor.rules.yml"
DASHBOARD = REPO / "packaging/grafana/vllm-supervisor.json"

CONFIG = """
global: {{scrape_interval: 500ms, evaluation_interval: 500ms}}
rule_files: [{rules}]
scrape_configs:
  - job_name: vllm-supervisor
    static_configs: [{{targets: ["127.0.0.1:{listen}"]}}]
"""
UNSEEN = {"engine_memory_growth", "engine_memory_exhaustion", "engine_draft", "gpu_reason", "gpu_xids"}
"""What needs an hour, a speculative engine, or a fault."""


def promtool(*arguments: str | Path, stdin: bytes = b"") -> None:
    done = subprocess.run(["promtool", *arguments], input=stdin, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b""), done.stdout + done.stderr


class Prometheus:
    """A server with the shipped rules that scrapes one daemon."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def ask(self, path: str) -> Any:
        """What the API answers; None while it does not."""
        with contextlib.suppress(OSError):
            answer = http("GET", f"{self._url}/{path}", timeout_s=20)
            if answer.status != 503:  # while it starts
                assert (answer.status, answer.json["status"]) == (200, "success"), (path, answer.text)
                return answer.json["data"]
        return None

    def query(self, expression: str) -> list[Any]:
        """The result of an expression now."""
        found: list[Any] = self.ask(f"query?query={quote(expression)}")["result"]
        return found


@contextlib.contextmanager
def prometheus(folder: Path, listen: int) -> Iterator[Prometheus]:
    port = free_port()
    (folder / "prometheus.yml").write_text(CONFIG.format(rules=RULES, listen=listen), encoding="utf-8")
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        yield Prometheus(port)
    finally:
        process.kill()
        process.wait(30)
        print((folder / "prometheus.log").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, int]]:
    """One engine that serves from a GPU, and one that does not start; the daemon and its port."""
    folder, listen = tmp_path_factory.mktemp("node"), free_port()
    box = NvmlBox.make(folder / "nvml", "h200", "rtx3090")
    warm = {"enabled": True, "prefill_tokens": 16, "decode_tokens": 2}
    good = Sim(folder, "good", gpus=[box.gpu(0).uuid], args={"gpu-memory-utilization": 0.9}, warmup=warm)
    bad = Sim(folder, "bad", mood={"start_error": {"line": "RuntimeError: no", "code": 1}}, restart={"max_restarts": 0})
    with Daemon(section(good, bad), env=box.env, listen=f"127.0.0.1:{listen}") as running:
        running.start()
        running.wait_state("good", "ready")
        running.wait_state("bad", "failed")
        running.request("restart", "good", "--now", "--wait")
        ask(good, count=12)
        running.wait_engine("good", lambda e: e["kv"]["total_blocks"] is not None, DEADLINE_S, "to be looked at")
        ask(good, count=12)
        running.wait_engine("good", lambda e: e["ttft_p95_ms"] is not None, DEADLINE_S, "to have answered")
        yield running, listen


def ask(sim: Sim, count: int) -> None:
    body = {"model": "tiny", "prompt": "hello " * 50, "max_tokens": 2}
    assert {http("POST", f"http://127.0.0.1:{sim.port}/v1/completions", body).status for _ in range(count)} == {200}


def test_promtool_finds_nothing_wrong_with_the_page(daemon: tuple[Daemon, int]) -> None:
    page = http("GET", f"http://127.0.0.1:{daemon[1]}/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert page.body.count(b"# HELP vllm_supervisor_") > 40
    promtool("check", "metrics", stdin=page.body)


def test_promtool_finds_nothing_wrong_with_the_rules(tmp_path: Path) -> None:
    promtool("check", "rules", RULES)
    for file in (RULES, Path(__file__).with_name("rules.test.yml")):
        shutil.copy(file, tmp_path)
    promtool("test", "rules", tmp_path / "rules.test.yml")


def test_every_alert_is_tested() -> None:
    tests = Path(__file__).with_name("rules.test.yml").read_text(encoding="utf-8")
    alerts = [line.split()[-1] for line in RULES.read_text(encoding="utf-8").splitlines() if "- alert:" in line]
    assert len(alerts) == 15
    assert [alert for alert in alerts if f"alertname: {alert}\n        exp_alerts:\n" not in tests] == []


def test_a_crash_loop_is_an_alert_and_the_dashboard_has_its_figures(daemon: tuple[Daemon, int], tmp_path: Path) -> None:
    with prometheus(tmp_path, daemon[1]) as server:
        wait_until(lambda: firing(server), DEADLINE_S, "an alert")
        assert firing(server) == [("VllmEngineCrashLoop", "bad")]
        assert server.query('up{job="vllm-supervisor"}')[0]["value"][1] == "1"
        # Rates need two scrapes.
        wait_until(lambda: server.query("rate(process_cpu_seconds_total[5m])"), DEADLINE_S, "another scrape")
        empty = [expression for expression in expressions() if not server.query(expression)]
        assert {name for name in UNSEEN if any(name in expression for expression in empty)} == UNSEEN
        assert [one for one in empty if not any(name in one for name in UNSEEN)] == []


def firing(server: Prometheus) -> list[tuple[str, str]]:
    alerts = (server.ask("alerts") or {"alerts": []})["alerts"]
    found = [alert["labels"] for alert in alerts if alert["state"] == "firing"]
    return [(labels["alertname"], labels["engine"]) for labels in found]


def expressions() -> list[str]:
    """What the dashboard asks for, with all machines and engines chosen."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    return [one.replace("$instance", ".*").replace("$engine", ".*") for one in found]
