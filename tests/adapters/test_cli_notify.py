"""`notify test`: one message to each receiver, without a daemon."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from supervisord.cli import main
from tests.adapters.fake_http import FakeServer, answer, unused_port


def config(folder: Path, **ports: int) -> str:
    path = folder / "config.toml"
    tables = [f'[notify.{name}]\nurl = "http://127.0.0.1:{port}/precious"\n' for name, port in ports.items()]
    path.write_text("".join(tables), encoding="utf-8")
    path.chmod(0o600)
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["notify", "test", *argv])
    out, err = capsys.readouterr()
    assert "precious" not in out + err
    return code, out, err


def test_a_message_to_one_or_to_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(lambda _: answer(204)) as good:
        path = config(tmp_path, good=good.port, down=unused_port())
        code, out, err = run(capsys, "good", "--config", path)
        assert (code, err) == (0, "")
        assert re.fullmatch(
            r"notify\.good \(http://127\.0\.0\.1:\d+/\.\.\.\): delivered in \d\.\d\d s \(HTTP 204\)\n", out
        )
        document = json.loads(good.requests[0].body)
        assert (document["kind"], document["engine"], document["severity"]) == ("notify_test", None, "notice")
        assert document["message"] == "this is a test of notify.good: no engine is concerned"
        code, out, err = run(capsys, "--config", path)
        assert (code, len(good.requests)) == (1, 2)
        assert "notify.good" in out
        assert re.search(r"cannot notify notify\.down .*: no connection: Connection refused\n", err)


def test_what_cannot_be_tested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, ops=unused_port())
    code, _, err = run(capsys, "opps", "--config", path)
    assert code == 5
    assert "it has: ops" in err
    code, _, err = run(capsys, "--config", config(tmp_path))
    assert code == 5
    assert "has no [notify.NAME]" in err
    Path(path).write_text("[notify.ops]\n", encoding="utf-8")
    code, _, err = run(capsys, "--config", path)
    assert code == 2
    assert "add url" in err
