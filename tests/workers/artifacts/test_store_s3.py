"""The store before a real S3 server: each byte comes once, whatever is killed or damaged in between."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fleet import until
from tests.s3 import FaultProxy, S3Server
from tests.workers.fake_remote import DEADLINE_S, ROOT
from workers.artifacts.fetch.progress import Progress
from workers.artifacts.fetch.transfer import S3Remote
from workers.artifacts.store.store import Store

SPAN = 2**16
NAMES = "config.json", "model-1.safetensors", "model-2.safetensors"
FILES = dict(zip(NAMES, (b"{}", *(random.Random(seed).randbytes(8 * SPAN + 100) for seed in (1, 2))), strict=True))
KEY, OTHER = "m/model-2.safetensors", "m/model-1.safetensors"
PROCESS = """
import sys
from pathlib import Path
from workers.artifacts.fetch.progress import Progress
from workers.artifacts.store.store import Store
from workers.artifacts.fetch.transfer import S3Remote

class Told(Progress):
    def enter(self, phase):
        super().enter(phase)
        print(phase, flush=True)

progress = Told(sys.argv[2])
Store(Path(sys.argv[1])).get(S3Remote(sys.argv[2], connections=4, span_bytes=2**16), progress)
print(progress.moved, flush=True)
"""


@pytest.fixture
def url(s3_server: S3Server, s3_proxy: FaultProxy) -> Iterator[str]:
    """A checkpoint, seen through the proxy."""
    yield f"{s3_server.bucket(files={f'm/{name}': data for name, data in FILES.items()})}/m"
    s3_proxy.heal()


def remote(url: str) -> S3Remote:
    return S3Remote(url, connections=4, span_bytes=SPAN)


def content(folder: str) -> dict[str, bytes]:
    return {name: (Path(folder) / name).read_bytes() for name in FILES}


def noted(root: Path) -> int:
    """Returns the ranges of objects that are recorded as complete."""
    return sum(len(path.read_text().splitlines()) - 1 for path in root.rglob("*.ranges"))


def assert_whole(root: Path) -> None:
    """Asserts that the store has one verified artifact and nothing else."""
    store = Store(root)
    (artifact,) = store.artifacts()
    assert content(artifact.folder) == FILES
    assert store.verify(artifact.key) == []
    assert sorted(path.name for path in (root / "artifacts").iterdir()) == [artifact.key]
    assert len(list((root / "blobs").iterdir())) == len(FILES)
    assert {path.name for path in Path(artifact.folder).iterdir()} == {*FILES, "corewright-artifact.json"}


@pytest.fixture
def fetching(tmp_path: Path, url: str) -> Iterator[subprocess.Popen[str]]:
    """Starts a process that fetches into the store; kills it after the test."""
    with subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(tmp_path), url],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:
        yield process
        process.kill()


def test_a_second_load_requests_only_the_listing(tmp_path: Path, url: str, s3_proxy: FaultProxy) -> None:
    """It transfers no bytes of objects."""
    size = sum(map(len, FILES.values()))
    first, second = Progress(url), Progress(url)
    Store(tmp_path).get(remote(url), first)
    assert (s3_proxy.bytes(), first.moved, first.status().done) == (size, size, size)
    s3_proxy.forget()
    Store(tmp_path).get(remote(url), second)
    assert (s3_proxy.bytes(), second.moved, second.status().done) == (0, 0, size)
    assert [request.key for request in s3_proxy.seen()] == [""]
    assert_whole(tmp_path)


@pytest.mark.slow
def test_two_processes_transfer_each_byte_once(
    tmp_path: Path, url: str, s3_proxy: FaultProxy, fetching: subprocess.Popen[str]
) -> None:
    """The second one waits while the first is within an object."""
    held, waiting = s3_proxy.hold(KEY, 5 * SPAN), Releasing(s3_proxy)
    assert held.reached.wait(DEADLINE_S)
    artifact = Store(tmp_path).get(remote(url), waiting)
    assert waiting.waited
    assert waiting.moved == 0
    assert s3_proxy.bytes() == artifact.bytes
    assert fetching.communicate(timeout=DEADLINE_S)[0].split()[-2:] == ["done", str(artifact.bytes)]
    assert_whole(tmp_path)


class Releasing(Progress):
    """Releases the delayed responses when it waits for another fetch."""

    def __init__(self, proxy: FaultProxy) -> None:
        super().__init__("s3")
        self.proxy = proxy
        self.waited = False

    def enter(self, phase: str) -> None:
        super().enter(phase)
        if phase == "waiting":
            self.waited = True
            self.proxy.heal()


@pytest.mark.live
def test_a_fetch_resumes_after_a_kill_within_objects(
    tmp_path: Path, url: str, s3_proxy: FaultProxy, fetching: subprocess.Popen[str]
) -> None:
    """Complete ranges are not requested again; meanwhile the artifact is incomplete."""
    held = [s3_proxy.hold(KEY, at * SPAN + 100) for at in range(8)]
    held += [s3_proxy.hold(OTHER, at * SPAN + 100) for at in range(4, 8)]
    until(lambda: sum(fault.reached.is_set() for fault in held) == 4, DEADLINE_S, "all connections are held")
    whole = min(4, len(s3_proxy.seen(OTHER)))
    until(lambda: noted(tmp_path) == whole, DEADLINE_S, "what came of the other object is noted")
    assert Store(tmp_path).artifacts() == ()
    fetching.kill()
    fetching.wait(DEADLINE_S)
    s3_proxy.heal()
    s3_proxy.forget()
    Store(tmp_path).get(remote(url))
    assert whole > 0
    assert s3_proxy.bytes(OTHER) == (8 - whole) * SPAN + 100
    assert 0 < s3_proxy.bytes(KEY) <= len(FILES[NAMES[2]])
    assert_whole(tmp_path)


@pytest.mark.slow
def test_only_damaged_files_are_fetched_again(tmp_path: Path, url: str, s3_proxy: FaultProxy) -> None:
    """`verify` finds them on the disk."""
    store = Store(tmp_path)
    artifact = store.get(remote(url))
    path = Path(artifact.folder) / NAMES[1]
    path.chmod(0o644)
    path.write_bytes(FILES[NAMES[1]][:-1] + b"?")
    assert store.verify(artifact.key) == [NAMES[1]]
    s3_proxy.forget()
    store.get(remote(url))
    assert s3_proxy.bytes() == s3_proxy.bytes(f"m/{NAMES[1]}") == len(FILES[NAMES[1]])
    assert_whole(tmp_path)


@pytest.mark.slow
def test_concurrent_fetches_survive_a_faulty_network(tmp_path: Path, url: str, s3_proxy: FaultProxy) -> None:
    """Flipped bytes, resets, errors and eight callers: one fetch, and all files are complete."""
    s3_proxy.flip(KEY, 3 * SPAN + 5)
    s3_proxy.cut("m/model-1.safetensors", 2 * SPAN + 7)
    s3_proxy.answer(share=0.1, times=5)
    result = [Progress(url) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        artifacts = list(pool.map(lambda progress: Store(tmp_path).get(remote(url), progress), result))
    assert len({artifact.folder for artifact in artifacts}) == 1
    assert sorted(progress.moved > 0 for progress in result) == [False] * 7 + [True]
    assert_whole(tmp_path)
