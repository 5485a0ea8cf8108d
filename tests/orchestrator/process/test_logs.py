"""Logs: one line a request, in text or JSON, off the hot path, and never with a key or, unasked, a prompt."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.process import logs
from orchestrator.process.logs import Access, LogFile, Logs, access_log, redacted

ROOT = Path(__file__).parents[3]
KEY = "cw-1a2b3c4d-" + "Zz9_-" * 8 + "abc"
log = logging.getLogger("orchestrator.something")


def access(**more: Any) -> Access:
    return Access(
        **{
            "method": "POST",
            "path": "/v1/chat/completions",
            "status": 200,
            "request_id": "req-1",
            "ms": 512.34,
            "model": "chat",
            "replica": "chat/0",
            "key": "1a2b3c4d",
            "prompt_tokens": 12,
            "completion_tokens": 34,
            "reason": "stop",
            **more,
        }
    )


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "logs" / "gateway.log"
    logs.tear_down()


def lines(log_file: Path, writer: Logs) -> list[str]:
    assert writer.flush(10.0)
    return log_file.read_text().splitlines()


def objects(log_file: Path, writer: Logs) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines(log_file, writer)]


def test_a_request_is_one_json_object(file: Path) -> None:
    """With caller, route, outcome, amounts and duration."""
    writer = logs.set_up(file, "json", stderr=False, wall=lambda: 1_795_183_685.25)
    access_log(access())

    assert objects(file, writer) == [
        {
            "time": "2026-11-20T14:08:05.250Z",
            "level": "INFO",
            "logger": "orchestrator.access",
            "message": "POST /v1/chat/completions 200",
            "method": "POST",
            "path": "/v1/chat/completions",
            "status": 200,
            "request_id": "req-1",
            "ms": 512.34,
            "model": "chat",
            "replica": "chat/0",
            "key": "1a2b3c4d",
            "prompt_tokens": 12,
            "completion_tokens": 34,
            "reason": "stop",
        }
    ]


def test_a_request_is_one_line_of_text(file: Path) -> None:
    """With the same content."""
    writer = logs.set_up(file, "text", stderr=False)
    access_log(access())

    (line,) = lines(file, writer)
    assert re.sub(r"^\S+ \S+ ", "", line) == (
        "INFO orchestrator.access: POST /v1/chat/completions 200 request_id=req-1 ms=512.3 model=chat replica=chat/0 "
        "key=1a2b3c4d prompt_tokens=12 completion_tokens=34 reason=stop"
    )


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_client_cannot_inject_log_lines(file: Path, form: Any) -> None:
    """Any path or request id is one line, and a value ends where it ends."""
    writer = logs.set_up(file, form, stderr=False)
    access_log(access(path="/a\nERROR b status=500 \x1b[31m\u2028", request_id='x" y\r\n\ud800'))

    (line,) = lines(file, writer)
    assert line.isprintable()
    if form == "text":
        assert ' "/a\\nERROR b status=500 \\u001b[31m\\u2028" 200 request_id="x\\" y' in line


@pytest.mark.parametrize("form", ["text", "json"])
def test_prompts_are_logged_only_if_enabled(file: Path, form: Any) -> None:
    """Neither the prompt nor the answer, unless `log_prompts` is on."""
    logged = access(prompt="my secret plan", answer="forty-two")
    writer = logs.set_up(file, form, stderr=False)
    access_log(logged)
    without = lines(file, writer)
    writer = logs.set_up(file, form, stderr=False, prompts=True)
    access_log(logged)
    every = lines(file, writer)

    assert "secret plan" not in without[0]
    assert "forty-two" not in without[0]
    assert "my secret plan" in every[1]
    assert "forty-two" in every[1]


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_key_reaches_the_log(file: Path, form: Any) -> None:
    """In a message, an argument, an error or a path: the key's id stays, its secret does not."""
    writer = logs.set_up(file, form, stderr=False)
    log.warning("a key: %s, and Authorization: Bearer sk-abcdefgh12345", KEY)
    try:
        raise ValueError(f"bad key {KEY}")
    except ValueError:
        log.exception("it failed")
    access_log(access(path=f"/v1/models?api_key={KEY}"))

    text = "\n".join(lines(file, writer))
    assert KEY[12:] not in text
    assert "abcdefgh12345" not in text
    assert text.count("cw-1a2b3c4d-***") >= 3


def test_redaction_does_not_change_other_text() -> None:
    """Similar names, and the id by which an operator finds the key."""
    for text in ("cw-models are fine", "cw-1a2b3c4d", "the bearer of news", "cw-1a2b3c4d-***", "no"):
        assert redacted(text) == text


def test_a_line_has_its_request_if_it_is_known(file: Path) -> None:
    """From `extra`, in separate fields; an error has its traceback, on the same line."""
    writer = logs.set_up(file, "json", stderr=False)
    log.info("sent on", extra={"request_id": "r7", "model": "chat", "replica": "chat/1"})
    try:
        raise KeyError("x")
    except KeyError:
        log.exception("it failed")

    sent, failed = objects(file, writer)
    assert {sent["request_id"], sent["model"], sent["replica"]} == {"r7", "chat", "chat/1"}
    assert (failed["level"], failed["logger"], failed["message"]) == ("ERROR", "orchestrator.something", "it failed")
    assert failed["error"].endswith("KeyError: 'x'")


def test_an_argument_is_logged_as_it_was(file: Path) -> None:
    """Though another thread writes it later."""
    writer = logs.set_up(file, "text", stderr=False)
    changing = [1]
    log.info("it is %s", changing)
    changing.append(2)

    assert lines(file, writer)[0].endswith("it is [1]")


def test_a_malformed_log_call_raises_nothing(file: Path) -> None:
    """It is logged as far as possible."""
    writer = logs.set_up(file, "json", stderr=False)
    log.info("%d of %s", "x")

    (line,) = objects(file, writer)
    assert line["message"].startswith("%d of %s (its arguments do not fit: ")


def test_an_uncaught_error_in_a_thread_is_logged(file: Path) -> None:
    """With its traceback, and the name of the thread."""
    writer = logs.set_up(file, "json", stderr=False)

    def fail() -> None:
        raise RuntimeError("nobody saw it")

    thread = threading.Thread(target=fail, name="reader")
    thread.start()
    thread.join()

    (line,) = objects(file, writer)
    assert (line["level"], line["message"]) == ("CRITICAL", "uncaught exception in reader")
    assert line["error"].endswith("RuntimeError: nobody saw it")


def test_a_fatal_error_is_the_last_line(tmp_path: Path) -> None:
    """Written before the process ends, with all pending lines."""
    program = (
        "import logging, sys; from pathlib import Path; from orchestrator.process import logs; "
        "logs.set_up(Path(sys.argv[1]), 'json', stderr=False); "
        "[logging.getLogger('orchestrator').info('line %d', i) for i in range(500)]; raise SystemError('the end')"
    )
    file = tmp_path / "x.log"
    subprocess.run([sys.executable, "-c", program, str(file)], cwd=Path(__file__).parents[3], check=False, timeout=60)
    lines = [json.loads(line) for line in file.read_text().splitlines()]

    assert [row["message"] for row in lines] == [*(f"line {i}" for i in range(500)), "uncaught exception"]
    assert lines[-1]["error"].endswith("SystemError: the end")


def test_a_log_is_rotated_before_it_grows_large(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By size, and only some files are kept; no line is lost, and the last ones are in the file itself."""
    monkeypatch.setattr(logs, "MAX_FILE_BYTES", 2000)
    writer = logs.set_up(file, "text", stderr=False)
    for i in range(300):
        log.info("line %d", i)
        assert writer.flush(10.0)

    names = sorted(path.name for path in file.parent.iterdir())
    assert names == ["gateway.log", *(f"gateway.log.{i}" for i in range(1, logs.KEPT + 1))]
    assert all(path.stat().st_size <= 2200 for path in file.parent.iterdir())
    text = "".join((file.parent / name).read_text() for name in [*names[:0:-1], names[0]])
    numbers = [int(line.rsplit(" ", 1)[1]) for line in text.splitlines()]
    assert numbers == list(range(300 - len(numbers), 300))


def test_several_processes_rotate_a_log_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them continues in the new file."""
    monkeypatch.setattr(logs, "MAX_FILE_BYTES", 100)
    first, second = LogFile(file), LogFile(file)
    first.write("x" * 150 + "\n")
    first.write("first\n")
    second.write("second\n")
    first.close()
    second.close()

    assert file.read_text() == "first\nsecond\n"
    assert sorted(path.name for path in file.parent.iterdir()) == ["gateway.log", "gateway.log.1"]


def test_a_link_is_not_used_as_a_log(tmp_path: Path) -> None:
    """The fleet would write to the link's target."""
    (tmp_path / "x.log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        LogFile(tmp_path / "x.log")


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_long_value_is_cut(file: Path, form: Any) -> None:
    """A path, a message and a traceback: each line has the original length."""
    writer = logs.set_up(file, form, stderr=False)
    access_log(access(path="/" + "a" * 30_000))
    log.info("%s", "b" * 100_000)
    try:
        raise ValueError("c" * 100_000)
    except ValueError:
        log.exception("it failed")

    written = file.read_text() if writer.flush(10.0) else ""
    assert "... (30001 characters)" in written
    assert "... (100000 characters)" in written
    assert max(map(len, written.splitlines())) < 3 * logs.MAX_MESSAGE
    assert written.count("a" * 100) * 100 < 2 * logs.MAX_FIELD + 200


def test_pending_lines_have_a_limit_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With logged prompts, a line may have megabytes."""
    monkeypatch.setattr(logs, "MOST_WAITING_BYTES", 100_000)
    disk = Stuck()
    writer = Logs([disk], "json", prompts=True, wall=time.time)
    for _ in range(50):
        writer.access(access(prompt="x" * 20_000))
    disk.goes_on.set()
    writer.flush(10.0)
    writer.access(access(prompt="y"))
    writer.close()

    lines = [json.loads(line) for text in disk.text for line in text.splitlines()]
    assert 4 <= sum(row.get("prompt", "").startswith("x") for row in lines) <= 6
    assert sum("were dropped" in row["message"] for row in lines) >= 1
    assert lines[-1]["prompt"] == "y"


def test_standard_error_gets_no_request_lines(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ray stores it without a limit; only messages of the process are there."""
    writer = logs.set_up(file, "json")
    access_log(access())
    log.info("something")
    assert writer.flush(10.0)

    assert [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()] == ["something"]
    assert len(file.read_text().splitlines()) == 2


class Stuck:
    """A file on a disk that takes nothing, until it does."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.text: list[str] = []

    def write(self, text: str) -> int:
        assert self.goes_on.wait(30.0)
        self.text.append(text)
        return len(text)

    def flush(self) -> None:
        pass


def test_a_stuck_disk_delays_no_request_and_uses_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines beyond the limit are dropped, and their number is logged."""
    monkeypatch.setattr(logs, "MOST_WAITING", 10)
    disk = Stuck()
    writer = Logs([disk], "json", prompts=False, wall=time.time)
    for _ in range(5000):
        writer.access(access())
    assert disk.text == []  # all came back, and nothing was written
    disk.goes_on.set()
    writer.flush(10.0)
    writer.access(access())
    writer.close()

    messages = [json.loads(line)["message"] for text in disk.text for line in text.splitlines()]
    lost = [int(message.split()[0]) for message in messages if "were dropped" in message]
    assert sum(lost) + len(messages) - len(lost) == 5001
    assert sum(lost) > 4000


def test_the_line_of_a_request_costs_almost_nothing(file: Path) -> None:
    """Below 10 us for the serving thread; the best of several runs, since the machine is shared."""
    writer = logs.set_up(file, "json", stderr=False)
    record = access()

    def run() -> float:
        began = time.thread_time()
        for _ in range(200):
            access_log(record)
        took = (time.thread_time() - began) / 200 * 1e6
        writer.flush(10.0)
        return took

    assert min(run() for _ in range(10)) < 10.0


def test_without_a_configured_log_nothing_is_written(tmp_path: Path) -> None:
    """In a test or a command, the calls still work."""
    line = "from tests.orchestrator.process.test_logs import access, access_log; access_log(access())"
    ran = subprocess.run([sys.executable, "-c", line], cwd=ROOT, capture_output=True, check=True)
    assert (ran.stdout, ran.stderr) == (b"", b"")
