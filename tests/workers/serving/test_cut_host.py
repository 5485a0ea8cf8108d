"""A host that is cut off, on real sockets between two network namespaces."""

from __future__ import annotations

import subprocess
import sys

import pytest

from workers.messages.wire import GATEWAY_S

APART = ["unshare", "--user", "--map-root-user", "--net"]
LATE_S = 6.0  # of a busy machine; TCP itself would take a quarter of an hour


def test_a_cut_host_is_given_up_within_seconds_and_used_again_when_it_is_back() -> None:
    """The gateway notices without sending a request, and reconnects to the same epoch without new routes."""
    try:
        subprocess.run([*APART, "ip", "link", "add", "name", "a", "type", "veth"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces are not available: {error}")
    words = [*APART, sys.executable, "-m", "tests.workers.serving.cut_host"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    gone_s, back_s = map(float, ended.stdout.split())
    assert GATEWAY_S - 1 <= gone_s <= GATEWAY_S + LATE_S
    assert back_s <= LATE_S
