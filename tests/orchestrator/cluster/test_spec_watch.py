"""`up --watch`: a changed file is applied, and one that cannot be read is reported once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.access.audit_log import Audit
from orchestrator.cluster.follower import SpecWatch
from orchestrator.messages.controller_replies import SpecReply


class Watched:
    """A watched file, and what follows from its changes."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "spec.yaml"
        self.file.write_text("one")
        self.applied: list[str] = []
        self.said: list[str] = []
        spec = ("one", str(self.file), str(folder))
        self.watch = SpecWatch(spec, Audit(folder / "audit"), self._apply, self.said.append)

    def _apply(self, text: str, file: str, base_dir: str) -> SpecReply:
        self.applied.append(text)
        return SpecReply(revision=len(self.applied) + 1, changed=True)

    def poll(self, times: int) -> None:
        for _ in range(times):
            self.watch.poll()


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def endless(file: Path) -> None:
    """A sparse file, as large as /dev/zero is long."""
    file.touch()
    os.truncate(file, 2**40)


@pytest.mark.parametrize(
    ("replace", "part"),
    [
        (lambda file: None, "No such file"),
        (os.mkfifo, "not a regular file"),
        (Path.mkdir, "Is a directory"),
        (endless, "larger than"),
        (lambda file: file.symlink_to("/dev/zero"), "not a regular file"),
        (lambda file: file.write_bytes(b"\xff\xfe"), "not UTF-8"),
    ],
    ids=["missing", "pipe", "folder", "endless", "device", "binary"],
)
def test_a_file_that_cannot_be_read_is_reported_once_and_watched_on(
    replace: Callable[[Path], object], part: str, watched: Watched
) -> None:
    """It blocks nothing, and the next valid text is applied."""
    watched.file.unlink()
    replace(watched.file)
    watched.poll(5)
    assert len(watched.said) == 2
    assert "spec-unreadable" in watched.said[0]
    assert part in watched.said[0]
    assert watched.said[1] == f"{watched.file} was rejected: the fleet is unchanged"

    if watched.file.is_dir():
        watched.file.rmdir()
    watched.file.unlink(missing_ok=True)
    watched.file.write_text("two")
    watched.poll(3)
    assert watched.applied == ["two"]


def test_a_file_that_an_editor_replaces_is_not_reported(watched: Watched) -> None:
    """It is missing for one poll, and partly written in another."""
    watched.file.unlink()
    watched.poll(1)
    watched.file.write_text("tw")
    watched.poll(1)
    watched.file.write_text("two")
    watched.poll(4)
    assert watched.applied == ["two"]
    assert watched.said == [f"{watched.file} has changed: revision 2"]


def test_a_file_that_is_missing_now_and_then_is_not_reported(watched: Watched) -> None:
    """Only in two polls in a row."""
    for _ in range(3):
        watched.file.unlink()
        watched.poll(1)
        watched.file.write_text("one")
        watched.poll(2)
    assert watched.said == []


def test_an_empty_file_is_a_change(watched: Watched) -> None:
    """The controller rejects it, with the reason."""
    watched.file.write_text("")
    watched.poll(3)
    assert watched.applied == [""]
