"""A fetch from a real S3 server through a proxy of faults: what arrives is whole and right, or there is an error."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.fleet import until
from tests.s3 import ACCESS_KEY, SECRET_KEY, SESSION_TOKEN, FaultProxy, S3Server, s3_environment
from tests.searches import search
from workers.artifacts.fetch import assembly as assembling
from workers.artifacts.fetch.assembly import Assembly
from workers.artifacts.fetch.progress import Progress
from workers.artifacts.fetch.retry_policy import RetryPolicy
from workers.artifacts.fetch.transfer import S3Remote
from workers.artifacts.sources.checksums import FIELDS, Checksum, digest
from workers.artifacts.sources.listing import Listing, RemoteFile, SourceError, Stopped
from workers.artifacts.sources.s3 import WORK
from workers.artifacts.store import contents as contents
from workers.artifacts.store.contents import digest_of

ROOT = Path(__file__).parents[3]
SPAN = 2**16
SIZE = 10 * SPAN + 1000
DEADLINE_S = 30.0
BIG = random.Random(1).randbytes(SIZE)
FILES = {"config.json": b"{}", "sub/a b/ä%20+#模.txt": b"odd", "empty": b"", "model.safetensors": BIG}
QUICK = RetryPolicy(first_s=0.001, longest_s=0.01)


class Play:
    """A checkpoint in S3, behind a proxy that the test can make faulty."""

    def __init__(self, server: S3Server, proxy: FaultProxy) -> None:
        self.server = server
        self.proxy = proxy
        self.url = f"{server.bucket(files={f'm/{name}': data for name, data in FILES.items()})}/m"
        self.remote = self.of(self.url)
        self.listing = self.remote.listing()

    def of(self, url: str, retry_policy: RetryPolicy = QUICK) -> S3Remote:
        return S3Remote(url, connections=4, span_bytes=SPAN, retry_policy=retry_policy)

    def fetch(self, folder: Path, listing: Listing | None = None, remote: S3Remote | None = None) -> Progress:
        progress = Progress("test")
        (remote or self.remote).fetch(listing or self.listing, folder, progress, threading.Event())
        return progress

    def failed(self, folder: Path, listing: Listing | None = None, remote: S3Remote | None = None) -> SourceError:
        with pytest.raises(SourceError) as error:
            self.fetch(folder, listing, remote)
        return error.value

    def only(self, name: str) -> Listing:
        return Listing(source=self.url, files=tuple(file for file in self.listing.files if file.name == name))


@pytest.fixture(scope="module")
def once(s3_server: S3Server) -> Iterator[Play]:
    with FaultProxy(s3_server.url) as proxy, s3_environment(proxy.env):
        yield Play(s3_server, proxy)


@pytest.fixture
def play(once: Play) -> Iterator[Play]:
    once.proxy.forget()
    yield once
    once.proxy.heal()


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_fetch_leaves_exactly_the_listed_files(play: Play, tmp_path: Path) -> None:
    """Large, small and empty files with special names; each byte is sent once."""
    progress = play.fetch(tmp_path / "new")
    status = progress.status()
    assert content(tmp_path / "new") == FILES
    assert not (tmp_path / "new" / WORK).exists()
    assert (status.done, status.total, progress.moved, play.proxy.bytes()) == (play.listing.bytes,) * 4


def test_a_second_fetch_transfers_nothing(play: Play, tmp_path: Path) -> None:
    """Complete files are not requested."""
    play.fetch(tmp_path)
    play.proxy.forget()
    progress = play.fetch(tmp_path)
    assert (play.proxy.bytes(), progress.moved, progress.status().done) == (0, 0, play.listing.bytes)


def test_a_file_with_wrong_content_is_replaced(play: Play, tmp_path: Path) -> None:
    """Not overwritten: another hard link may be in use."""
    play.fetch(tmp_path)
    wrong = tmp_path / "model.safetensors"
    with wrong.open("r+b") as file:
        file.write(b"?")
    os.link(wrong, tmp_path.parent / "other name")
    play.proxy.forget()
    play.fetch(tmp_path)
    assert content(tmp_path) == FILES
    assert (tmp_path.parent / "other name").read_bytes()[:1] == b"?"
    assert play.proxy.bytes() == SIZE


def test_small_files_are_fetched_first(play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a load can begin."""
    monkeypatch.setattr("workers.artifacts.fetch.transfer.SMALL_BYTES", 100)
    files = {"a-large": BIG, "z-small": b"1", "y-small": b"2"}
    remote = S3Remote(play.server.bucket(files=files), connections=1, span_bytes=SPAN, retry_policy=QUICK)
    play.fetch(tmp_path, remote.listing(), remote)
    order = [seen.key for seen in play.proxy.requests if seen.method == "GET" and seen.key]
    assert order == ["y-small", "z-small"] + ["a-large"] * 11


def test_an_empty_prefix_is_an_error(play: Play) -> None:
    """A single object is not a prefix."""
    with pytest.raises(SourceError, match=r"^s3-not-found: no objects below s3://.*/m/empty/"):
        play.of(f"{play.url}/empty").listing()


# Damage

PART = 100_000


def uploaded(play: Play, kind: str, data: bytes) -> None:
    """Uploads key "k" to the bucket, with the checksum ``kind``."""
    import boto3
    from botocore.config import Config  # type: ignore[import-untyped]

    bucket = play.url.split("/")[2]
    plain = Config(request_checksum_calculation="when_required", s3={"addressing_style": "path"})
    with s3_environment(play.server.env):
        s3 = boto3.client("s3", config=plain)
    algorithm, _, parts = kind.partition(" ")
    options = {} if algorithm == "md5" else {"ChecksumAlgorithm": algorithm.upper()}
    if not parts:
        s3.put_object(Bucket=bucket, Key=f"k/{kind}", Body=data, **options)
        return
    upload = s3.create_multipart_upload(Bucket=bucket, Key=f"k/{kind}", **options)["UploadId"]
    done, at = [], 0
    for number, size in enumerate([*map(int, parts.split("+")), len(data)], 1):
        part = data[at : at + size]
        at += len(part)
        result = s3.upload_part(
            Bucket=bucket, Key=f"k/{kind}", UploadId=upload, PartNumber=number, Body=part, **options
        )
        done.append({"ETag": result["ETag"], "PartNumber": number})
    s3.complete_multipart_upload(Bucket=bucket, Key=f"k/{kind}", UploadId=upload, MultipartUpload={"Parts": done})


@pytest.mark.parametrize("kind", ["md5", *FIELDS])
def test_a_flipped_byte_is_detected_by_each_checksum(kind: str, play: Play, tmp_path: Path) -> None:
    """The object is fetched again: twice its bytes are transferred."""
    uploaded(play, kind, BIG)
    remote = S3Remote(play.url[:-1] + "k", connections=2, span_bytes=SPAN, retry_policy=QUICK)
    listing = Listing(source="", files=tuple(file for file in remote.listing().files if file.name == kind))
    play.proxy.flip(f"k/{kind}", SIZE // 2)
    progress = play.fetch(tmp_path, listing, remote)
    assert (content(tmp_path) == {kind: BIG}, progress.moved, progress.status().done) == (True, 2 * SIZE, SIZE)


@pytest.mark.parametrize("kind", ["md5", "crc64nvme", "sha256"])
@pytest.mark.parametrize("parts", [f"{3 * PART}", f"{PART}+{PART + 1}", f"{PART + 1}+{PART + 2}+{PART}"])
def test_multipart_uploads_are_verified(kind: str, parts: str, play: Play, tmp_path: Path) -> None:
    """By a checksum of the whole or of the parts, also if their sizes differ in the middle only."""
    data = random.Random(2).randbytes(3 * PART + 70_000)
    kind = f"{kind} {parts}"
    uploaded(play, kind, data)
    remote = S3Remote(play.url[:-1] + "k", connections=2, span_bytes=SPAN // 2, retry_policy=QUICK)
    listing = Listing(source="", files=tuple(file for file in remote.listing().files if file.name == kind))
    play.proxy.flip(f"k/{kind}", len(data) - 1)
    play.fetch(tmp_path, listing, remote)
    assert content(tmp_path) == {kind: data}


def test_an_object_that_is_always_damaged_is_an_error(play: Play, tmp_path: Path) -> None:
    """It never gets its final name."""
    play.proxy.flip("m/model.safetensors", 5, times=99)
    error = play.failed(tmp_path)
    assert (error.id, "m/model.safetensors failed its checksum 3 times" in str(error)) == ("s3-damaged", True)
    assert not (tmp_path / "model.safetensors").exists()


def test_a_short_object_is_an_error(play: Play, tmp_path: Path) -> None:
    """S3 sends less than it lists; the file never gets its final name."""
    play.proxy.shorten("m/model.safetensors", 10)
    error = play.failed(tmp_path)
    assert (error.id, (tmp_path / "model.safetensors").exists()) == ("s3-damaged", False)


def test_a_short_response_is_completed(play: Play, tmp_path: Path) -> None:
    """Only the missing bytes are requested."""
    play.proxy.shorten("m/model.safetensors", 10, times=3)
    progress = play.fetch(tmp_path)
    assert (content(tmp_path), progress.moved) == (FILES, play.listing.bytes)


def test_an_object_replaced_during_the_fetch_is_an_error(play: Play, tmp_path: Path) -> None:
    """Two versions are never mixed."""
    url = play.server.bucket(files={"m": BIG, "n": b"1"})
    remote = play.of(url)
    listing = remote.listing()
    held = [play.proxy.hold("m", at * SPAN) for at in (4, 5, 6, 7)]  # all connections: none comes to the end
    results: list[SourceError] = []
    thread = threading.Thread(target=lambda: results.append(play.failed(tmp_path, listing, remote)))
    thread.start()
    assert all(fault.reached.wait(DEADLINE_S) for fault in held)
    play.server.client().put_object(Bucket=url.removeprefix("s3://"), Key="m", Body=BIG[::-1])
    play.proxy.heal()
    thread.join(DEADLINE_S)
    assert ([error.id for error in results], (tmp_path / "m").exists()) == (["s3-changed"], False)
    assert [play.failed(tmp_path, listing, remote).id] == ["s3-changed"]


# Connections


@pytest.mark.parametrize("at", ["first", "middle", "last"])
def test_a_reset_connection_resumes_within_its_range(at: str, play: Play, tmp_path: Path) -> None:
    """All ranges are interrupted; received bytes are not requested again."""
    for start in range(0, SIZE, SPAN):
        size = min(SPAN, SIZE - start)
        play.proxy.cut("m/model.safetensors", start + {"first": 0, "middle": size // 2, "last": size - 1}[at])
    play.fetch(tmp_path)
    assert content(tmp_path) == FILES
    assert len(play.proxy.seen("m/model.safetensors")) == 22


def test_transient_errors_do_not_change_the_result(play: Play, tmp_path: Path) -> None:
    """503 and 500 for all kinds of requests."""
    play.proxy.answer(503, "SlowDown", share=0.5, times=6)
    play.proxy.answer(500, "InternalError", share=0.5, times=6)
    progress = play.fetch(tmp_path)
    assert (content(tmp_path), progress.moved) == (FILES, play.listing.bytes)
    assert sum(seen.status in (500, 503) for seen in play.proxy.requests) >= 6


class Outage:
    """Makes S3 unavailable in the middle of a fetch, until its threads have waited for ``seconds``."""

    def __init__(self, play: Play, seconds: float) -> None:
        self._play = play
        self._seconds = seconds
        self._lock = threading.Lock()
        self.now = 0.0
        self.retry_policy = RetryPolicy(seconds=60.0, clock=lambda: self.now, wait=self._wait)
        held = play.proxy.hold("m/model.safetensors", SIZE // 2)
        self._breaker = threading.Thread(target=lambda: held.reached.wait(DEADLINE_S) and play.proxy.away())
        self._breaker.start()

    def _wait(self, stop: threading.Event, seconds: float) -> bool:
        self._breaker.join()
        with self._lock:
            before, self.now = self.now, self.now + seconds / 4  # four threads wait at the same time
            if before < self._seconds <= self.now:
                self._play.proxy.back()
        return stop.is_set()


def test_a_fetch_survives_an_outage_of_half_a_minute(play: Play, tmp_path: Path) -> None:
    """It continues by itself, and fetches nothing twice."""
    outage = Outage(play, 30.0)
    progress = play.fetch(tmp_path, remote=play.of(play.url, outage.retry_policy))
    assert (content(tmp_path), progress.moved, outage.now >= 30.0) == (FILES, play.listing.bytes, True)


def test_a_long_outage_fails_the_fetch_and_keeps_received_ranges(play: Play, tmp_path: Path) -> None:
    """The next fetch resumes."""
    outage = Outage(play, float("inf"))
    error = play.failed(tmp_path, remote=play.of(play.url, outage.retry_policy))
    kept = play.proxy.bytes()
    play.proxy.back()
    play.proxy.forget()
    play.fetch(tmp_path)
    assert (error.id, content(tmp_path)) == ("s3-unreachable", FILES)
    assert play.proxy.bytes() <= play.listing.bytes - kept + 4 * SPAN


def test_a_stopped_fetch_ends_soon_and_is_resumed(play: Play, tmp_path: Path) -> None:
    """Also while a connection is silent."""
    held = play.proxy.hold("m/model.safetensors", 5 * SPAN + 10)
    stop = threading.Event()
    threading.Thread(target=lambda: held.reached.wait(DEADLINE_S) and stop.set()).start()
    with pytest.raises(Stopped):
        play.remote.fetch(play.listing, tmp_path, Progress("test"), stop)
    play.proxy.heal()
    play.fetch(tmp_path)
    assert content(tmp_path) == FILES


# Refusals


@pytest.mark.parametrize(("method", "key"), [("GET", "m/model.safetensors"), ("HEAD", "m/config.json")])
def test_a_denied_fetch_names_the_action_and_key_but_no_secret(
    method: str, key: str, play: Play, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """S3's response holds the access key; neither the error nor the log repeats it."""
    caplog.set_level(logging.DEBUG)
    play.proxy.answer(403, "AccessDenied", key=key, methods=(method,))
    error = play.failed(tmp_path)
    bucket = play.url.split("/")[2]
    assert str(error) == (
        f"s3-denied: s3:GetObject on s3://{bucket}/{key} is not allowed; allow s3:GetObject on"
        f" arn:aws:s3:::{bucket}/{key} in the policy of the role"
    )
    said = f"{error} {error.__cause__} {caplog.text}"
    assert [mark for mark in (ACCESS_KEY, SECRET_KEY, SESSION_TOKEN, "Signature") if mark in said] == []


# The disk


def test_a_disk_that_is_too_small_fails_the_fetch_at_once(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has both sizes."""
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    error = play.failed(tmp_path)
    assert (error.id, f"{play.listing.bytes} bytes needed, 1000 free" in str(error)) == ("s3-disk-full", True)
    assert play.proxy.requests == []


def test_a_full_disk_fails_the_fetch_and_keeps_received_ranges(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next fetch resumes when there is space again."""
    written = [0]

    def pwrite(file: int, data: Any, at: int) -> int:
        if written[0] > SIZE // 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = real(file, data, at)
        written[0] += count
        return count

    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", pwrite)
    error = play.failed(tmp_path)
    monkeypatch.setattr(os, "pwrite", real)
    play.proxy.forget()
    play.fetch(tmp_path)
    assert (error.id, content(tmp_path)) == ("s3-disk-full", FILES)
    assert play.proxy.bytes() <= SIZE // 2 + 4 * SPAN


FETCH = """
import json, resource, sys, threading
from pathlib import Path
import msgspec
from workers.artifacts.sources.listing import Listing, SourceError
from workers.artifacts.fetch.progress import Progress
from workers.artifacts.fetch.transfer import S3Remote
url, listing, folder, span, limit = json.loads(sys.argv[1])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
remote = S3Remote(url, connections=4, span_bytes=span)
try:
    remote.fetch(msgspec.json.decode(listing, type=Listing), Path(folder), Progress(url), threading.Event())
except SourceError as error:
    print(error)
"""


def process(play: Play, folder: Path, limit: int = 0) -> subprocess.Popen[str]:
    """Starts a process that fetches; ``limit``: the largest file that it may write, in bytes."""
    import msgspec

    result = json.dumps([play.url, msgspec.json.encode(play.listing).decode(), str(folder), SPAN, limit])
    return subprocess.Popen([sys.executable, "-c", FETCH, result], stdout=subprocess.PIPE, text=True, cwd=ROOT)


@pytest.mark.slow
def test_a_file_size_limit_counts_as_a_full_disk(play: Play, tmp_path: Path) -> None:
    """Like a quota; the process survives and reports it."""
    with process(play, tmp_path, limit=SIZE // 2) as fetching:
        said, _ = fetching.communicate(timeout=DEADLINE_S)
    assert (fetching.returncode, said[:13]) == (0, "s3-disk-full:")


def test_an_unwritable_folder_is_an_error(play: Play, tmp_path: Path) -> None:
    """Here a file in its place: root can write into any folder."""
    (tmp_path / "file").write_text("")
    assert play.failed(tmp_path / "file" / "folder").id == "s3-disk-unwritable"


# kill -9


@pytest.fixture
def killed(play: Play, tmp_path: Path) -> Path:
    """The folder of a process that was killed during a fetch, after seven complete ranges."""
    held = [play.proxy.hold("m/model.safetensors", at * SPAN + 100) for at in (7, 8, 9, 10)]
    with process(play, tmp_path) as fetching:
        for fault in held:
            assert fault.reached.wait(DEADLINE_S)
        (ledger,) = (tmp_path / WORK).glob("*.ranges")
        until(lambda: ledger.read_text().count("\n") >= 8, DEADLINE_S, "seven ranges are whole")
        fetching.kill()
    play.proxy.heal()
    play.proxy.forget()
    return tmp_path


@pytest.mark.slow
def test_after_a_kill_complete_ranges_are_not_fetched_again(play: Play, killed: Path) -> None:
    """No file has its final name before it is complete."""
    assert not (killed / "model.safetensors").exists()
    progress = play.fetch(killed)
    assert content(killed) == FILES
    assert sorted(seen.start or 0 for seen in play.proxy.seen("m/model.safetensors")) == [
        at * SPAN for at in (7, 8, 9, 10)
    ]
    assert (play.proxy.bytes("m/model.safetensors"), progress.status().done) == (3 * SPAN + 1000, play.listing.bytes)


@pytest.mark.slow
def test_ranges_that_a_crash_lost_are_fetched_again(play: Play, killed: Path) -> None:
    """A range that is in the ledger but not on disk, and a ledger with a truncated last line."""
    (ledger,) = (killed / WORK).glob("*.ranges")
    with ledger.open("a") as file:
        file.write("655360 6556")
    with ledger.with_suffix("").open("r+b") as data:
        data.seek(2 * SPAN)
        data.write(bytes(4096))
    play.fetch(killed)
    assert content(killed) == FILES
    assert sorted(seen.start or 0 for seen in play.proxy.seen("m/model.safetensors")) == [
        at * SPAN for at in (2, 7, 8, 9, 10)
    ]


# One object


@search(12, cost=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=4),
    span=st.integers(1, 30),
    piece=st.integers(1, 30),
    algorithm=st.sampled_from(["md5", *FIELDS]),
    composite=st.booleans(),
    noise=st.randoms(use_true_random=False),
    flipped=st.booleans(),
)
def test_ranges_may_arrive_in_any_order(
    sizes: list[int],
    span: int,
    piece: int,
    algorithm: str,
    composite: bool,
    noise: random.Random,
    flipped: bool,
    tmp_path: Path,
) -> None:
    """However the object was uploaded and split; one wrong byte is detected."""
    data = noise.randbytes(sum(sizes))
    if not composite:
        sizes = [len(data)]
    cut = [data[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]
    value = digest(algorithm, b"".join(digest(algorithm, part) for part in cut) if composite else data)
    checksum = Checksum(algorithm=algorithm, value=value, composite=composite)
    file = RemoteFile(name="a", size=len(data), tag="t")
    work = tmp_path / hashlib.md5(noise.randbytes(8)).hexdigest()
    arrived = bytearray(data)
    if flipped and data:
        arrived[noise.randrange(len(data))] ^= 1
    with patch.object(contents, "PIECE_BYTES", piece), patch.object(assembling, "PIECE_BYTES", piece):
        assembly = Assembly(file, tmp_path / "a", work, checksum, sizes, span)
        spans = [*assembly.spans]
        noise.shuffle(spans)
        for wanted in spans:
            assembly.write(bytes(arrived[wanted.start : wanted.end]), wanted.start)
            assembly.accept(wanted, assembly.read(wanted))
        assert (assembly.is_valid(), assembly.content()) == (arrived == data, known_by(arrived, piece))  # type: ignore[arg-type]
    assembly.publish()
    assert ((tmp_path / "a").read_bytes(), assembly.is_already_complete()) == (arrived, arrived == data)


def known_by(data: bytes, piece: int) -> str:
    """Computes the digest of a content by the description in docs/artifacts.md."""
    pieces = [blake3(data[at : at + piece]).digest() for at in range(0, len(data), piece)]
    several = blake3(b"".join(pieces), derive_key_context="corewright 2026-11-22 contents by pieces of 8 MiB")
    return (several if len(pieces) > 1 else blake3(data)).hexdigest()


def test_large_contents_are_hashed_by_pieces(tmp_path: Path) -> None:
    """Of 8 MiB; a file and arriving ranges give the same digest."""
    for size in (0, 1, 2**23 - 1, 2**23, 2**23 + 1, 2**24, 2**24 + 5):
        data = random.Random(size).randbytes(size)
        (tmp_path / "a").write_bytes(data)
        assert digest_of(tmp_path / "a") == known_by(data, 2**23)


@pytest.mark.parametrize("piece", [SPAN, 3 * SPAN])
def test_each_file_appears_after_its_digest_was_recorded(
    play: Play, tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not ranges are pieces of the content, and after damage and resets: no second read is needed."""
    for module in (contents, assembling):
        monkeypatch.setattr(module, "PIECE_BYTES", piece)
    play.proxy.flip("m/model.safetensors", 3)
    play.proxy.cut("m/model.safetensors", 2 * SPAN + 7)
    progress = play.fetch(tmp_path)
    assert progress.digests == {name: known_by(data, piece) for name, data in FILES.items()}


def test_an_ended_fetch_renames_no_files(play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads may still verify while the next fetch uses the folder."""
    comparing, go_on, right = threading.Event(), threading.Event(), Assembly.is_valid

    def slow(assembly: Assembly) -> bool:
        if assembly.file.name == "model.safetensors":
            comparing.set()
            assert go_on.wait(DEADLINE_S)
        return right(assembly)

    monkeypatch.setattr(Assembly, "is_valid", slow)
    monkeypatch.setattr("workers.artifacts.fetch.transfer.LEAVE_S", 0.01)
    before, stop = set(threading.enumerate()), threading.Event()
    threading.Thread(target=lambda: comparing.wait(DEADLINE_S) and stop.set()).start()
    with pytest.raises(Stopped):
        play.remote.fetch(play.only("model.safetensors"), tmp_path, Progress("test"), stop)
    left = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("s3-")]
    go_on.set()
    for thread in left:
        thread.join(DEADLINE_S)
    assert (len(left), (tmp_path / "model.safetensors").exists()) == (1, False)
    play.fetch(tmp_path)
    assert content(tmp_path) == FILES


def test_reads_from_disk_can_be_stopped(tmp_path: Path) -> None:
    """A resumed fetch reads files of gigabytes."""
    (tmp_path / "a").write_bytes(BIG)
    requests: list[Any] = []

    def go_on() -> None:
        requests.append(None)
        raise Stopped

    checksum = Checksum(algorithm="md5", value=hashlib.md5(BIG).digest(), composite=False)
    file = RemoteFile(name="a", size=SIZE, tag="")
    assembly = Assembly(file, tmp_path / "a", tmp_path / "work", checksum, [SIZE], SPAN, go_on)
    with pytest.raises(Stopped):
        assembly.is_already_complete()
    with pytest.raises(Stopped):
        assembly.read(assembly.spans[0])
    assert len(requests) == 2
    assembly.close()


def test_ten_thousand_parts_take_less_than_two_cpu_seconds(tmp_path: Path) -> None:
    """All connections would wait."""
    sizes = [1000] * 20_000
    began = time.process_time()
    checksum = Checksum(algorithm="crc32", value=b"", composite=True)
    file = RemoteFile(name="a", size=sum(sizes), tag="")
    result = Assembly(file, tmp_path / "a", tmp_path / "work", checksum, sizes, 1000).spans
    assert ((result[1].start, result[-1].end), time.process_time() - began < 2.0) == ((1000, sum(sizes)), True)
