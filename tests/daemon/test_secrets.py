"""Keys and tokens reach the engine that needs them, and nobody else."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.daemon.harness import Daemon
from tests.daemon.outside import everything_on_command_lines
from tests.daemon.sims import Sim, section
from tests.sim.engine import http, wait_until

KEY, NEW_KEY = "sk-0f3c9a7e51d24b86", "sk-77aa88bb99cc00dd"
TOKEN = "hf_QmFzZTY0IGlzIG5vdCBlbmNyeXB0aW9u"
OWN = "AKIA-the-daemons-own-and-nobody-elses"
WARM = {"enabled": True, "prefill_tokens": 16, "decode_tokens": 2}


def written_by_the_daemon(daemon: Daemon) -> str:
    """All of its files but the engines' own logs and the copy of the configuration, and its log."""
    files = [path for path in daemon.state_dir.rglob("*") if path.is_file() and path.parent.name != "logs"]
    files.remove(daemon.state_dir / "applied.json")
    assert {"node.json", "a.jsonl"} <= {path.name for path in files}
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in [*files, daemon.log])


def told_by_commands(daemon: Daemon) -> str:
    commands = [
        ("status",),
        ("status", "--json"),
        ("plan", "--config", str(daemon.config)),
        ("check-config", str(daemon.config)),
        ("reload",),
        ("restart", "a", "--wait"),
    ]
    done = [daemon.cli(*command) for command in commands]
    assert [each.returncode for each in done if each.returncode > 1] == [], done
    return "\n".join(each.stdout + each.stderr for each in done)


def test_secrets_reach_the_engine_only(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text(f"{KEY}\n", encoding="utf-8")
    key_file.chmod(0o600)
    sim = Sim(tmp_path, "a", api_key_file=str(key_file), env={"HF_TOKEN": TOKEN}, warmup=WARM)
    with Daemon(section(sim), {"AWS_SECRET_ACCESS_KEY": OWN}) as daemon:
        daemon.start()
        ready = daemon.wait_state("a", "ready")
        assert (ready["health"], ready["warmup"]["rounds"] >= 1) == ("ok", True)
        environment = sim.starts()[0]["env"]
        assert (environment["VLLM_API_KEY"], environment["HF_TOKEN"]) == (KEY, TOKEN)
        assert OWN not in environment.values()
        models = f"http://127.0.0.1:{sim.port}/v1/models"
        assert http("GET", models).status == 401
        assert http("GET", models, headers={"Authorization": f"Bearer {KEY}"}).status == 200

        # An engine that dies quotes what it knows.
        sim.mood.set(start_error={"line": f"RuntimeError: cannot use {TOKEN} with {KEY}", "code": 1})
        os.kill(ready["pid"], signal.SIGKILL)
        daemon.wait_event("exited", "a", 2)
        sim.mood.clear()
        daemon.request("start", "a", "--wait")
        texts = [told_by_commands(daemon), everything_on_command_lines(), written_by_the_daemon(daemon)]
        for text in texts:
            for secret in (KEY, TOKEN, OWN):
                assert secret not in text, text[max(0, text.find(secret) - 300) :][:600]
        assert "cannot use" in texts[-1], "the rest of its last words is told"
        for path in (*daemon.state_dir.glob("*.json"), daemon.state_dir / "identity" / "a.jsonl"):
            assert path.stat().st_mode & 0o077 == 0

        # A new key is a new plan: by a reload, and by the next daemon.
        generation = daemon.engine("a")["generation"]
        for number, (key, other) in enumerate(((NEW_KEY, KEY), (KEY, NEW_KEY)), 1):
            if number == 2:
                daemon.kill()
            key_file.write_text(key, encoding="utf-8")
            if number == 1:
                assert "a: its launch plan changed: it is restarted" in daemon.request("reload", "--wait")
            else:
                daemon.start()
            ready = daemon.wait_state("a", "ready", generation=generation + number)
            assert ready["health"] == "ok"
            assert http("GET", models, headers={"Authorization": f"Bearer {key}"}).status == 200
            assert http("GET", models, headers={"Authorization": f"Bearer {other}"}).status == 401


def test_a_warm_up_that_is_refused_is_said(tmp_path: Path) -> None:
    locked = Sim(tmp_path, "locked", mood={"api_key": KEY}, warmup={**WARM, "on_failure": "restart"})
    garbage = Sim(tmp_path, "garbage", mood={"completion": "garbage"}, warmup={**WARM, "decode_tokens": 32})
    hang = Sim(tmp_path, "hang", mood={"completion": "hang"}, warmup={**WARM, "timeout_s": 1})
    broken = Sim(tmp_path, "broken", mood={"completion": 500}, warmup={**WARM, "on_failure": "restart"})
    with Daemon(section(locked, garbage, hang, broken)) as daemon:
        daemon.start()
        reasons = {"locked": "warmup_refused", "garbage": "garbage", "hang": "warmup_timeout"}
        for name, code in reasons.items():
            engine = daemon.wait_state(name, "ready")
            assert (engine["health"], [reason["code"] for reason in engine["reasons"]]) == ("degraded", [code])
            assert engine["generation"] == 1
            assert [event["reason"] for event in daemon.events("ready", name)] == [code]
        assert "401" in daemon.engine("locked")["reasons"][0]["message"]
        assert "api_key_file" in daemon.engine("locked")["reasons"][0]["message"]
        wait_until(lambda: len(broken.starts()) > 1, 30, "a restart, as on_failure says")
        broken.mood.clear()
        daemon.wait_state("broken", "ready")
        assert daemon.cli("status").returncode == 0, "degraded is ready"
