"""A child process replies in lines of JSON; other output goes to its log."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from workers.host import json_process
from workers.host.host_facts import last_words
from workers.host.json_process import NEVER_SET

PROJECT = Path(__file__).parents[3]
TALKER = """\
import logging, os, sys
import msgspec
from workers.host.json_process import answering

class Word(msgspec.Struct):
    text: str

request = sys.stdin.read()
reply = answering()
print("a library greets")
os.write(1, b"so does its C code\\n")
logging.getLogger("talker").info("at work")
reply(Word(request))
reply(Word(str([os.environ.get(name) for name in sys.argv[1].split(",")])))
"""


def test_output_of_libraries_is_not_a_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log has it. The child does not get variables that no replica gets."""
    (tmp_path / "talker.py").write_text(TALKER)
    never = NEVER_SET[0]
    monkeypatch.setenv(never, "1")
    log_file = tmp_path / "logs" / "talker.log"
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(PROJECT)]), "NEURON_PROCESS_TAG": "chat/0"}
    process = json_process.start(
        ("talker", f"{never},NEURON_PROCESS_TAG"), python=sys.executable, env=env, log_file=str(log_file)
    )
    replies, _ = process.communicate(b"a question", timeout=60)
    assert [json.loads(line)["text"] for line in replies.splitlines()] == ["a question", "[None, 'chat/0']"]
    words = last_words(log_file)
    assert {"a library greets", "so does its C code"} <= set(words)
    assert any("talker: at work" in line for line in words)


class LargeRequest(json_process.ChildRequest, frozen=True):
    text: str


def test_a_child_that_does_not_read_its_request_is_ended_by_the_limit(tmp_path: Path) -> None:
    """A pipe takes 64 KiB; the rest of the request would wait for ever."""
    (tmp_path / "deaf.py").write_text("import signal\nsignal.pause()\n")
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(PROJECT)])}
    request, log_file = LargeRequest(text="x" * 2**20), str(tmp_path / "log")
    with json_process.running(
        ("deaf",), request, python=sys.executable, env=env, log_file=log_file, limit_s=0.1
    ) as process:
        assert process.wait(30) == -9
