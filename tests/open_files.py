"""Checks that each test file closes what it opens."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# Once for a process, libraries open the signal pipe of libuv, the event loops of the Rust clients for S3 and the hub,
# and the log of hf-xet. What the last test of a file uses is not yet deleted: for each tokenizer a few processes, with
# a socket and a pidfd each.
MOST_LEFT = 24
SLOW = ("live", "soak", "browser", "compile", "real", "clients", "vllm", "slow")  # as in `make test-fast`
CLOSE_S = 10.0  # for threads and processes that end


def open_files() -> dict[str, str]:
    """Returns what each file descriptor of this process refers to."""
    files = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            files[link.name] = str(link.readlink())
        except OSError:  # it was that of the listing
            continue
    return files


@pytest.fixture(scope="module", autouse=True)
def closes_files(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a file of fast tests that leaves more than `MOST_LEFT` file descriptors open: thousands of tests share a
    process."""
    before = open_files()
    yield
    deadline = time.monotonic() + CLOSE_S
    while len(after := open_files()) - len(before) > MOST_LEFT and _is_fast(request):
        gc.collect()
        assert time.monotonic() < deadline, sorted(set(after.items()) - set(before.items()))
        time.sleep(0.05)


def _is_fast(request: pytest.FixtureRequest) -> bool:
    """Returns whether no test of the file starts a fleet or has another reason to be slow. Ray, for example, keeps its
    connections."""
    tests = [item for item in request.session.items if item.getparent(pytest.Module) is request.node]
    return not any(item.get_closest_marker(name) for item in tests for name in SLOW)
