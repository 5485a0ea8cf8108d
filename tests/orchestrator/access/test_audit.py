"""The audit log: what changes something is written before it happens, whole, and without secrets."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from orchestrator.access import audit_log as audit_module
from orchestrator.access.audit_log import KEPT, Audit, recorded
from orchestrator.cli.main import run
from orchestrator.process.failure import Failed
from orchestrator.process.home import Home


@pytest.fixture
def audit(tmp_path: Path) -> Audit:
    return Audit(tmp_path / "audit.log")


def test_an_action_is_written_before_and_after(audit: Audit) -> None:
    """As two lines of JSON that are shown as one action; only its user can read them."""
    line = audit.begin("key 0123abcd ops", "POST /scale", {"model": "chat", "count": 3}, by="ada@wright (key ops)")
    assert [entry.status for entry in audit.entries(9)] == [None]
    audit.finish(line, "200", 7)

    (entry,) = audit.entries(9)
    assert (entry.who, entry.by, entry.action) == ("key 0123abcd ops", "ada@wright (key ops)", "POST /scale")
    assert (entry.arguments, entry.status, entry.revision) == ({"model": "chat", "count": 3}, "200", 7)
    first, second = [json.loads(text) for text in audit.path.read_text().splitlines()]
    assert first["request"] == second["request"]
    assert audit.path.stat().st_mode & 0o777 == 0o600


def test_a_spec_is_logged_by_its_digest(audit: Audit) -> None:
    """Its text could contain anything, and is in the revision. Long values are cut."""
    audit.begin("fleet token", "POST /apply", {"text": "models: secret", "file": "f" * 1000, "canary": None})
    (entry,) = audit.entries(1)
    assert entry.arguments.keys() == {"spec", "file"}
    assert entry.arguments["spec"].startswith("sha256:")
    assert len(entry.arguments["file"]) == 300
    assert "secret" not in audit.path.read_text()


def test_a_key_pasted_as_a_name_is_not_logged(audit: Audit) -> None:
    """In any argument, since others read the log."""
    key = f"cw-0123abcd-{'x' * 43}"
    audit.begin("fleet token", "POST /load", {"model": key, "names": [f"Bearer {key}"]})

    assert key not in audit.path.read_text()
    assert "cw-0123abcd-***" in audit.path.read_text()


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_without_disk_space_no_action_runs(audit: Audit, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no incomplete line is left behind."""
    audit.begin("up", "up", {})
    before, done = audit.path.read_bytes(), []
    monkeypatch.setattr(audit_module.os, "fsync", full)  # type: ignore[attr-defined]
    with pytest.raises(Failed, match="No space left") as failed, recorded(audit, "command", "x", {}, by="me"):
        done.append("x")
    assert failed.value.problem.id == "audit-unwritable"
    assert (done, audit.path.read_bytes()) == ([], before)


def test_an_incompletely_written_line_is_removed(audit: Audit, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that fills up during the write."""
    audit.begin("up", "up", {})
    before, write = audit.path.read_bytes(), os.write
    writes = iter((lambda file, data: write(file, data[:10]), full))
    monkeypatch.setattr(audit_module.os, "write", lambda file, data: next(writes)(file, data))  # type: ignore[attr-defined]
    with pytest.raises(Failed):
        audit.begin("up", "end", {})
    assert audit.path.read_bytes() == before


def test_a_failure_is_logged_with_its_id_and_raised(audit: Audit) -> None:
    with pytest.raises(Failed), recorded(audit, "command", "keys revoke", {}, by="me"):
        raise Failed("key-unknown", "", "")
    with recorded(audit, "command", "keys create", {}, by="me"):
        pass
    assert [entry.status for entry in audit.entries(9)] == ["key-unknown", "done"]


def test_a_line_cut_off_by_a_crash_does_not_affect_others(audit: Audit) -> None:
    """The next one starts on a new line."""
    audit.begin("up", "up", {})
    with audit.path.open("ab") as file:
        file.write(b'{"at": 1, "req')
    audit.begin("up", "end", {})
    assert [entry.action for entry in audit.entries(9)] == ["up", "end"]


def test_a_link_is_not_followed(audit: Audit, tmp_path: Path) -> None:
    """The daemon cannot be made to write to another file."""
    (tmp_path / "victim").write_text("")
    audit.path.symlink_to(tmp_path / "victim")
    with pytest.raises(Failed):
        audit.begin("up", "up", {})
    assert (tmp_path / "victim").read_text() == ""


def test_a_large_log_is_rotated(tmp_path: Path) -> None:
    """A few old files are kept, and are shown in order."""
    audit = Audit(tmp_path / "audit.log", max_bytes=400)
    for number in range(60):
        audit.finish(audit.begin("up", f"a{number}", {}), "done")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["audit.log", *(f"audit.log.{number}" for number in range(1, KEPT + 1))]
    records = [entry.action for entry in audit.entries(1000)]
    assert records == [f"a{number}" for number in range(60)][-len(records) :]
    assert 5 < len(records) < 60


def test_refused_requests_do_not_push_out_accepted_ones(tmp_path: Path) -> None:
    """However many they are: the oldest refused ones are dropped, the newest are kept."""
    audit = Audit(tmp_path / "audit.log", max_bytes=4000)
    audit.finish(audit.begin("key ops", "accepted", {}), "200")
    started = audit.begin("key ops", "started", {})
    for number in range(500):
        audit.finish(audit.begin("key evil", f"refused {number}", {}), "404")
    audit.finish(started, "200")

    records = [(entry.action, entry.status) for entry in audit.entries(1000)]

    assert records[:2] == [("accepted", "200"), ("started", "200")]
    assert records[-1] == ("refused 499", "404")
    assert [path.name for path in tmp_path.iterdir()] == ["audit.log"]
    assert audit.path.stat().st_size <= 4000


def test_every_argument_has_a_bounded_size(audit: Audit) -> None:
    names = ["n" * 1000] * 1000
    audit.begin("w" * 1000, "POST /x", {"names": names, "nested": {"a" * 1000: [names]}}, by="b" * 1000)

    assert audit.path.stat().st_size < 20_000
    (entry,) = audit.entries(1)
    assert entry.arguments["names"][-2:] == ["n" * 300, "and 980 more"]


WRITER = """
import sys
from pathlib import Path
from orchestrator.access.audit_log import Audit
audit = Audit(Path(sys.argv[1]), max_bytes=20_000)
for number in range(100):
    audit.finish(audit.begin(sys.argv[2], str(number), {}), "done")
"""


def test_several_writers_lose_no_lines(audit: Audit) -> None:
    """Also while the log is rotated."""
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(audit.path), writer]) for writer in ("a", "b")]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    records = [(entry.who, entry.action, entry.status) for entry in audit.entries(1000)]
    assert sorted(records) == sorted((writer, str(number), "done") for writer in ("a", "b") for number in range(100))


def test_a_writer_waits_for_another(audit: Audit) -> None:
    """Also for one that rotates the log: the line then goes to the new file."""
    audit.begin("up", "first", {})
    held = os.open(audit.path, os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    writer = threading.Thread(target=audit.begin, args=("up", "second", {}))
    writer.start()
    writer.join(0.3)
    assert writer.is_alive()
    audit.path.rename(audit.path.with_name("audit.log.1"))
    os.close(held)
    writer.join(10)
    assert "second" in audit.path.read_text()
    assert [entry.action for entry in audit.entries(9)] == ["first", "second"]


def test_commands_are_audited_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Created keys and rejected commands are logged, without the key itself."""
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "home"))
    assert run(["audit"]) == 0
    assert capsys.readouterr().out == "nothing yet\n"
    run(["keys", "create", "ci"])
    text = capsys.readouterr().out.strip()
    run(["keys", "create", "ci"])
    run(["keys", "revoke", text])
    run(["keys", "revoke", "ci"])
    capsys.readouterr()
    assert run(["audit", "-n", "3", "-o", "json"]) == 0
    records = json.loads(capsys.readouterr().out)["actions"]
    assert [(record["action"], record["status"]) for record in records] == [
        ("keys create", "key-name-taken"),
        ("keys revoke", "key-unknown"),
        ("keys revoke", "done"),
    ]
    assert text[-43:] not in Home(tmp_path / "home").audit.read_text()
    assert run(["audit"]) == 0
    assert "keys create  done" in capsys.readouterr().out


def test_a_key_is_not_created_if_it_cannot_be_audited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = Home(tmp_path)
    home.audit.mkdir()
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path))
    assert run(["keys", "create", "ci"]) == 1
    assert "error: audit-unwritable: " in capsys.readouterr().err
    assert not home.keys.exists()
    assert run(["audit"]) == 1
    assert "error: audit-unreadable: " in capsys.readouterr().err
