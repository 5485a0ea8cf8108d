"""What gateways record of their requests, and how it is read again."""

from __future__ import annotations

import errno
import io
import os
import threading
from pathlib import Path

import pytest
from typing_extensions import Buffer

from orchestrator.gateway.telemetry import recorder as recorder_of
from orchestrator.gateway.telemetry.recorder import BUFFERED, RequestRecorder
from orchestrator.messages.request_traces import parts, read_page
from orchestrator.simulate.trace_file import read_trace, write_trace
from workers.host import private_file


def note(recorder: RequestRecorder, count: int, first: int = 0) -> None:
    for i in range(first, first + count):
        recorder.note(1_700_000_000.0 + i, "m", i + 1, 5, "k1", 0.02, 0.4)


def pages(folder: Path, limit: int) -> list[int]:
    """The prompt tokens of all that can be read, page by page."""
    lengths, after, more = list[int](), "", True
    while more:
        page = read_page(folder, after, limit)
        lengths += [request["prompt_tokens"] for request in page.requests]
        after, more = page.next, page.more
    return lengths


def test_recorded_requests_are_read_back_completely(tmp_path: Path) -> None:
    recorder = RequestRecorder(tmp_path / "traces", "g1")
    note(recorder, 1)
    recorder.close()
    assert read_page(tmp_path / "traces", "", 10).requests == [
        {
            "time": 1_700_000_000.0,
            "model": "m",
            "prompt_tokens": 1,
            "output_tokens": 5,
            "key": "k1",
            "first_ms": 20.0,
            "decode_ms": 400.0,
        }
    ]


@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_pages_have_each_request_once(tmp_path: Path, limit: int) -> None:
    """Of two gateways and several files, for any page size."""
    for gateway, first in (("g1", 0), ("g2", 100)):
        recorder = RequestRecorder(tmp_path, gateway, file_bytes=300)
        for i in range(0, 20, 5):
            note(recorder, 5, first + i)
            recorder.flush()
    assert len(parts(tmp_path)["g1"]) > 1
    assert sorted(pages(tmp_path, limit)) == [*range(1, 21), *range(101, 121)]


def test_a_page_continues_after_the_last_one(tmp_path: Path) -> None:
    """With what was written meanwhile, and nothing else."""
    recorder = RequestRecorder(tmp_path, "g1")
    note(recorder, 3)
    recorder.flush()
    after = read_page(tmp_path, "", 10).next
    note(recorder, 2, 3)
    recorder.flush()
    assert [request["prompt_tokens"] for request in read_page(tmp_path, after, 10).requests] == [4, 5]


def test_the_files_are_bounded_and_the_oldest_is_removed(tmp_path: Path) -> None:
    """Cursors stay valid: the reader continues with the rest."""
    recorder = RequestRecorder(tmp_path, "g1", file_bytes=100, files=3)
    note(recorder, 1)
    recorder.flush()
    after = read_page(tmp_path, "", 10).next
    for i in range(1, 40):
        note(recorder, 1, i)
        recorder.flush()
        os.utime(parts(tmp_path)["g1"][-1][1], (i, i))  # the files' ages, without waiting for the clock
    requests = read_page(tmp_path, after, 100).requests
    assert len(parts(tmp_path)["g1"]) == 3
    assert requests[-1]["prompt_tokens"] == 40
    assert 1 < len(requests) < 12


def test_a_gateway_of_the_same_name_continues_the_same_file(tmp_path: Path) -> None:
    for first in (0, 3):
        recorder = RequestRecorder(tmp_path, "g1")
        note(recorder, 3, first)
        recorder.close()
    assert pages(tmp_path, 100) == [1, 2, 3, 4, 5, 6]


def test_an_incomplete_line_of_a_crash_is_skipped(tmp_path: Path) -> None:
    """The next gateway writes to a new file."""
    recorder = RequestRecorder(tmp_path, "g1")
    note(recorder, 1)
    recorder.close()
    (_, path), *_ = parts(tmp_path)["g1"]
    path.write_bytes(path.read_bytes() + b"1700000001.000,m,7")
    again = RequestRecorder(tmp_path, "g1")
    note(again, 1, 1)
    again.close()
    assert pages(tmp_path, 100) == [1, 2]


class PlayedFile(io.FileIO):
    def __init__(self, path: Path, disk: PlayedDisk) -> None:
        super().__init__(private_file.open_to_append(path), "wb")
        self._disk = disk

    def write(self, data: Buffer) -> int:
        self._disk.writing.set()
        assert self._disk.free.wait(10)
        return super().write(bytes(data)[: len(bytes(data)) // 2] if self._disk.full else data)


class PlayedDisk:
    """A disk that blocks until it is ``free``, and accepts only half of a write while it is ``full``."""

    def __init__(self) -> None:
        self.full = False
        self.writing, self.free = threading.Event(), threading.Event()
        self.free.set()

    def open(self, path: Path) -> PlayedFile:
        return PlayedFile(path, self)


def test_a_full_disk_costs_lines_but_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are counted, and reported when the disk accepts writes again; later lines are complete."""
    disk = PlayedDisk()
    recorder = RequestRecorder(tmp_path, "g1", open_file=disk.open)
    note(recorder, 1)
    recorder.flush()
    disk.full = True
    note(recorder, 5, 1)
    recorder.flush()
    disk.full = False
    note(recorder, 1, 6)
    recorder.close()
    assert (recorder.dropped, pages(tmp_path, 100)) == (5, [1, 7])
    assert caplog.messages[-1] == "requests are recorded again; 5 were lost"


def test_no_request_waits_for_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All streams of a gateway would stall. Lines are buffered up to a limit, and written later."""
    monkeypatch.setattr(recorder_of, "MAX_BUFFERED_REQUESTS", 2000)
    disk = PlayedDisk()
    disk.free.clear()
    recorder = RequestRecorder(tmp_path, "g1", open_file=disk.open)
    note(recorder, BUFFERED)
    assert disk.writing.wait(10)
    note(recorder, 2005, BUFFERED)
    recorder.write_soon()
    disk.free.set()
    recorder.close()
    assert (recorder.dropped, pages(tmp_path, 5000)) == (5, [*range(1, BUFFERED + 2001)])


def test_a_folder_that_cannot_be_created_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    recorder = RequestRecorder(tmp_path / "file", "g1")
    for _ in range(3):
        note(recorder, 1)
        recorder.flush()
    assert recorder.dropped == 3
    assert sum(os.strerror(errno.EEXIST) in line or "not recorded" in line for line in caplog.messages) == 1


def test_an_unknown_cursor_is_rejected(tmp_path: Path) -> None:
    """It comes from a client."""
    with pytest.raises(ValueError, match="not a position"):
        read_page(tmp_path, "../x", 10)


def test_an_export_is_a_valid_trace(tmp_path: Path) -> None:
    """In the order of the times, for any gateway and any end."""
    for gateway, first in (("g1", 50), ("g2", 0)):
        recorder = RequestRecorder(tmp_path, gateway)
        note(recorder, 2, first)
        recorder.close()
    text = io.StringIO()
    assert write_trace(read_page(tmp_path, "", 100).requests, text) == 4
    text.seek(0)
    trace = read_trace(text, "trace.csv", {"m": "m"})
    assert [(arrival.at, arrival.prompt_tokens) for arrival in trace] == [(0.0, 1), (1.0, 2), (50.0, 51), (51.0, 52)]
    assert trace.begins == 1_700_000_000.0


def test_requests_without_an_answer_are_exported_too(tmp_path: Path) -> None:
    """They arrived, and may have used a slot; a request without a prompt is omitted."""
    recorder = RequestRecorder(tmp_path, "g1")
    recorder.note(1_700_000_000.0, "m", 5, 0)
    recorder.note(1_700_000_001.0, "m", 0, 0)
    recorder.close()
    text = io.StringIO()
    write_trace(read_page(tmp_path, "", 100).requests, text)
    text.seek(0)
    assert [request.output_tokens for request in read_trace(text, "trace.csv", {"m": "m"})] == [1]
