"""The limits of keys at the gateways: counted together, by whoever lives, and never at the cost of a request."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.access.keys import Allowance, ApiKey, KeyFile
from orchestrator.gateway.admission import usage_counts as counts_module
from orchestrator.gateway.admission.key_limits import FREE, KeyLimits
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.process.home import Home
from tests.fleet import until
from tests.orchestrator.encoded import EncoderReplica, HeldEncoder
from tests.orchestrator.gateways import LiveGateway, routes
from tests.served import Served

NOW = 5000.0  # monotonic seconds


def key(id: str = "0123abcd", **limits: Any) -> ApiKey:
    return ApiKey(
        id=id, name="ci", digest="0" * 64, scopes=("inference",), models=(), created=0.0, expires=None, **limits
    )


@pytest.fixture
def gateways(tmp_path: Path) -> Iterator[Callable[[], KeyLimits]]:
    """Makes one more gateway of a fleet of two."""
    opened: list[KeyLimits] = []

    def key_limits() -> KeyLimits:
        opened.append(KeyLimits(tmp_path / "limits", 2))
        return opened[-1]

    yield key_limits
    for limits in opened:
        limits.close()


def refusal(limits: KeyLimits, of: ApiKey, tokens: int = 1, now: float = NOW, **named: Any) -> ApiError:
    with pytest.raises(ApiError) as refused:
        limits.take(of, tokens, now, **named)
    return refused.value


def limit_headers(limits: KeyLimits, of: ApiKey, now: float = NOW) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in limits.headers(of, now)}


def test_a_key_without_limits_costs_nothing(gateways: Callable[[], KeyLimits], tmp_path: Path) -> None:
    """Nothing is counted, sent or opened."""
    limits = gateways()
    assert limits.take(None, 10**9, NOW) is limits.take(key(weight=3.0), 10**9, NOW) is FREE
    FREE.settle(10**9, NOW)
    assert (limits.headers(None, NOW), limits.headers(key(), NOW)) == ((), ())
    assert not (tmp_path / "limits").exists()


def test_a_client_gets_its_limits_in_openais_headers(gateways: Callable[[], KeyLimits]) -> None:
    """Only those that are set."""
    limits, ci = gateways(), key(requests_per_minute=600, tokens_per_minute=6000)
    limits.take(ci, 864, NOW)
    assert limit_headers(limits, ci) == {
        "x-ratelimit-limit-requests": "600",
        "x-ratelimit-remaining-requests": "599",
        "x-ratelimit-reset-requests": "100ms",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "5136",
        "x-ratelimit-reset-tokens": "8.64s",
    }
    assert "x-ratelimit-limit-requests" not in limit_headers(limits, key(tokens_per_minute=6000))
    assert limit_headers(limits, key(max_concurrent=1)) == {}


def test_a_request_over_a_limit_is_rejected_until_the_retry_time(gateways: Callable[[], KeyLimits]) -> None:
    """429, with a computed Retry-After; rejected requests are not charged."""
    limits, ci = gateways(), key(requests_per_minute=600, tokens_per_minute=6000)
    limits.take(ci, 5900, NOW)
    for _ in range(3):
        refused = refusal(limits, ci, 500)
        assert (refused.status, refused.code, refused.retry_after_s) == (429, "rate_limit_exceeded", 4)
    assert "6000 tokens per minute" in refused.message
    assert refusal(limits, ci, 500, NOW + 3.9).retry_after_s == 1
    assert limits.take(ci, 500, NOW + 4).reserved == 500
    assert limit_headers(limits, ci, NOW + 4)["x-ratelimit-remaining-requests"] == "599"


def test_a_request_that_can_never_pass_is_not_429(gateways: Callable[[], KeyLimits]) -> None:
    """Which clients would retry repeatedly. Without a number from the client, its bucket is reserved."""
    limits, ci = gateways(), key(tokens_per_minute=100)
    refused = refusal(limits, ci, 101)
    assert (refused.status, refused.code, refused.retry_after_s) == (400, "over_rate_limit", None)
    assert refusal(limits, ci, 4096, least=101).code == "over_rate_limit"
    assert limits.take(ci, 4096, NOW, least=100).reserved == 100


def test_unused_tokens_are_returned_once(gateways: Callable[[], KeyLimits]) -> None:
    """And the place with them."""
    limits, ci = gateways(), key(tokens_per_minute=6000, max_concurrent=1)
    grant = limits.take(ci, 6000, NOW)
    assert refusal(limits, ci).message.startswith("This API key's limit of 1 requests at a time")
    grant.settle(1000, NOW)
    grant.settle(0, NOW)
    assert limit_headers(limits, ci)["x-ratelimit-remaining-tokens"] == "5000"
    limits.take(ci, 1, NOW)
    refused = refusal(limits, ci)
    assert (refused.status, refused.code, refused.retry_after_s) == (429, "rate_limit_exceeded", 1)


def test_the_end_of_one_request_frees_one_place(gateways: Callable[[], KeyLimits]) -> None:
    """The others keep theirs."""
    limits, ci = gateways(), key(max_concurrent=3)
    first, *_ = [limits.take(ci, 1, NOW) for _ in range(3)]
    first.settle(1, NOW)
    limits.take(ci, 1, NOW)
    assert refusal(limits, ci).status == 429


def test_the_gateways_of_a_fleet_count_together(gateways: Callable[[], KeyLimits]) -> None:
    """Requests, tokens and places; each key for itself."""
    first, other = gateways(), gateways()
    ci = key(requests_per_minute=4, tokens_per_minute=100, max_concurrent=3)
    grants = [first.take(ci, 10, NOW), other.take(ci, 10, NOW), first.take(ci, 10, NOW)]
    assert limit_headers(first, ci) == limit_headers(other, ci)
    assert limit_headers(other, ci)["x-ratelimit-remaining-tokens"] == "70"
    assert "3 requests at a time" in refusal(other, ci).message
    grants[0].settle(10, NOW)
    other.take(ci, 10, NOW)
    grants[1].settle(10, NOW)
    assert "4 requests per minute" in refusal(first, ci).message
    assert first.take(key("0123abce", requests_per_minute=1), 1, NOW).reserved == 1


def test_a_changed_limit_applies_from_the_next_request_on(gateways: Callable[[], KeyLimits]) -> None:
    """Running requests are counted, too."""
    limits = gateways()
    limits.take(key(max_concurrent=2), 1, NOW)
    assert "limit of 1 requests" in refusal(limits, key(max_concurrent=1)).message
    limits.take(key(max_concurrent=2), 1, NOW)
    assert limits.take(key(requests_per_minute=1), 1, NOW).reserved == 1


KEY = (
    "ApiKey(id='0123abcd', name='ci', digest='', scopes=('inference',), models=(), created=0.0, expires=None, "
    "max_concurrent=2, requests_per_minute=1000)"
)
PROCESS = f"""
import sys
from pathlib import Path
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.admission.key_limits import KeyLimits
from orchestrator.access.keys import ApiKey
limits, ci = KeyLimits(Path(sys.argv[1]), 2), {KEY}
"""
TAKER = f"""{PROCESS}
for _ in range(2):
    limits.take(ci, 1, {NOW})
print("taken", flush=True)
sys.stdin.read()
"""


def test_a_dead_gateway_keeps_no_places(gateways: Callable[[], KeyLimits], tmp_path: Path) -> None:
    """For any kind of death; while it lives they are its own."""
    limits, ci = gateways(), key(max_concurrent=2)
    command = [sys.executable, "-c", TAKER, str(tmp_path / "limits")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "taken\n"
        assert "2 requests at a time" in refusal(limits, ci).message
        other.kill()
        other.wait()
    limits.take(ci, 1, NOW + 0.3)
    limits.take(ci, 1, NOW + 0.3)
    assert "2 requests at a time" in refusal(limits, ci, 1, NOW + 0.3).message


def test_a_new_gateway_does_not_inherit_places(gateways: Callable[[], KeyLimits]) -> None:
    """It is another process, and starts without requests."""
    survivor, first, ci = gateways(), gateways(), key(max_concurrent=2)
    survivor.take(ci, 1, NOW)
    first.take(ci, 1, NOW)
    assert refusal(survivor, ci).status == 429
    first.close()
    second = gateways()
    second.take(key("0123abce", max_concurrent=1), 1, NOW)
    grant = survivor.take(ci, 1, NOW + 1)
    assert refusal(second, ci, 1, NOW + 1).status == 429
    grant.settle(1, NOW + 1)
    second.take(ci, 1, NOW + 1)


def broken(file: Path, how: str) -> None:
    if how == "removed":
        file.unlink()
    elif how == "folder removed":
        for path in [*file.parent.iterdir()]:
            path.unlink()
        file.parent.rmdir()
    elif how == "cut":
        os.truncate(file, 5)
    else:
        byte = {"ones": b"\xff", "text": b"a", "zeros": b"\0"}[how]
        size = file.stat().st_size
        file.write_bytes(byte * size)


@pytest.mark.parametrize("how", ["removed", "folder removed", "cut", "ones", "text", "zeros"])
def test_a_damaged_file_costs_no_request_and_recovers(
    how: str, gateways: Callable[[], KeyLimits], tmp_path: Path
) -> None:
    """Within a second the gateways count together again; each gateway knows its running requests."""
    first, other = gateways(), gateways()
    ci = key(requests_per_minute=60, max_concurrent=2)
    running = first.take(ci, 1, NOW)
    other.take(ci, 1, NOW).settle(1, NOW)
    (file,) = (tmp_path / "limits").glob("counts-*")
    broken(file, how)

    first.headers(ci, NOW + 1)
    other.take(ci, 1, NOW + 1).settle(1, NOW + 1)
    first.take(ci, 1, NOW + 1)
    assert limit_headers(first, ci, NOW + 1) == limit_headers(other, ci, NOW + 1)
    assert limit_headers(first, ci, NOW + 1)["x-ratelimit-remaining-requests"] == "58"
    assert refusal(other, ci, 1, NOW + 1).status == refusal(first, ci, 1, NOW + 1).status == 429
    running.settle(1, NOW + 1)
    other.take(ci, 1, NOW + 1)


def test_with_an_unusable_folder_each_gateway_counts_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """This is logged once; the folder is used as soon as possible."""
    (tmp_path / "limits").write_text("")
    first, other = KeyLimits(tmp_path / "limits", 2), KeyLimits(tmp_path / "limits", 2)
    ci = key(requests_per_minute=2, max_concurrent=2)
    for second in range(3):
        first.take(ci, 1, NOW + 60 * second).settle(1, NOW + 60 * second)
    first.take(ci, 1, NOW + 120).settle(1, NOW + 120)
    assert "2 requests per minute" in refusal(first, ci, 1, NOW + 120).message
    other.take(ci, 1, NOW + 120).settle(1, NOW + 120)
    assert len([record for record in caplog.records if "counted by this gateway alone" in record.message]) == 2
    (tmp_path / "limits").unlink()
    other.take(ci, 1, NOW + 121).settle(1, NOW + 121)
    first.take(ci, 1, NOW + 121).settle(1, NOW + 121)
    assert "2 requests per minute" in refusal(other, ci, 1, NOW + 121).message
    first.close()
    other.close()


def test_a_full_disk_takes_no_place_from_the_gateways(
    gateways: Callable[[], KeyLimits], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it has space again, they count together, however often they tried before."""
    first, other, ci = gateways(), gateways(), key(max_concurrent=2)

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", refuse)
        for second in range(10):
            first.take(ci, 1, NOW + second).settle(1, NOW + second)

    first.take(ci, 1, NOW + 10)
    first.take(ci, 1, NOW + 10)

    assert "2 requests at a time" in refusal(other, ci, 1, NOW + 10).message


def test_a_gateway_waits_for_a_counting_one(
    gateways: Callable[[], KeyLimits], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no count is lost."""
    limits, ci, waited = gateways(), key(requests_per_minute=60), list[float]()
    limits.take(ci, 1, NOW)
    (file,) = (tmp_path / "limits").glob("counts-*")
    with file.open("rb") as held:

        def lets_go(seconds: float) -> None:
            waited.append(seconds)
            fcntl.flock(held, fcntl.LOCK_UN)

        monkeypatch.setattr(counts_module, "LOCK_S", 10.0)
        monkeypatch.setattr(counts_module.time, "sleep", lets_go)  # type: ignore[attr-defined]
        fcntl.flock(held, fcntl.LOCK_EX)
        limits.take(ci, 1, NOW)
    assert len(waited) == 1


def test_a_gateway_stopped_while_counting_delays_no_request(
    gateways: Callable[[], KeyLimits], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A count may be lost, but no request; after the first one none even waits."""
    limits, ci = gateways(), key(requests_per_minute=60)
    limits.take(ci, 1, NOW)
    (file,) = (tmp_path / "limits").glob("counts-*")
    with file.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        limits.take(ci, 1, NOW).settle(1, NOW)
        monkeypatch.setattr(counts_module, "LOCK_S", 1e9)
        limits.take(ci, 1, NOW).settle(1, NOW)
    assert limit_headers(limits, ci)["x-ratelimit-remaining-requests"] == "57"


@pytest.mark.parametrize("now", [NOW, 5.0])
def test_keys_that_share_a_cell_of_the_file_are_counted_separately(
    now: float, gateways: Callable[[], KeyLimits]
) -> None:
    """As long as at most eight of them are in use; then one is forgotten, and no request is rejected for it. Also
    soon after the machine's start.
    """
    limits = gateways()
    same = [f"{n * (counts_module.CELLS - counts_module.PROBES):08x}" for n in range(9)]
    keys = [key(id, requests_per_minute=60) for id in same]
    for number, owner in enumerate(keys[:8]):
        for _ in range(number):
            limits.take(owner, 1, now)
    remaining = [limit_headers(gateways(), key, now)["x-ratelimit-remaining-requests"] for key in keys]
    assert remaining == [str(60 - n) for n in range(8)] + ["60"]
    limits.take(keys[8], 1, now)
    assert [limit_headers(limits, key, now)["x-ratelimit-remaining-requests"] for key in keys[7:]] == ["53", "59"]


def test_unused_cells_are_reused(gateways: Callable[[], KeyLimits], tmp_path: Path) -> None:
    """A key without requests for ten minutes has full buckets; the file needs no cell for it."""
    limits = gateways()
    same = [f"{n * (counts_module.CELLS - counts_module.PROBES):08x}" for n in range(20)]
    for number, id in enumerate(same):
        limits.take(key(id, requests_per_minute=60), 1, NOW + 601 * number).settle(1, NOW + 601 * number)
    (file,) = (tmp_path / "limits").glob("counts-*")
    assert file.stat().st_size < 200


def test_a_cell_taken_by_another_key_is_not_changed(gateways: Callable[[], KeyLimits]) -> None:
    """The former key searches for a new one."""
    own, other, later = gateways(), gateways(), NOW + 601
    first, second = (
        key(f"{n * (counts_module.CELLS - counts_module.PROBES):08x}", requests_per_minute=60) for n in (0, 1)
    )
    own.take(first, 1, NOW).settle(1, NOW)
    for _ in range(5):
        other.take(second, 1, later).settle(1, later)
    own.take(first, 1, later)
    for limits in (own, other):
        assert limit_headers(limits, first, later)["x-ratelimit-remaining-requests"] == "59"
        assert limit_headers(limits, second, later)["x-ratelimit-remaining-requests"] == "55"


def test_other_users_cannot_read_or_write_the_counts(gateways: Callable[[], KeyLimits], tmp_path: Path) -> None:
    """They show the usage of each key."""
    gateways().take(key(requests_per_minute=1), 1, NOW)
    folder = tmp_path / "limits"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


HAMMER = f"""{PROCESS}
print("ready", flush=True)
sys.stdin.readline()
passed = 0
for _ in range(2000):
    try:
        limits.take(ci, 1, {NOW}).settle(1, {NOW})
        passed += 1
    except ApiError:
        pass
print(passed, flush=True)
"""


def test_two_racing_gateways_accept_as_many_requests_as_one(tmp_path: Path) -> None:
    """Exactly."""
    command = [sys.executable, "-c", HAMMER, str(tmp_path / "limits")]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    outputs = [process.communicate("go\n", timeout=60)[0] for process in processes]
    assert sum(int(text) for text in outputs) == 1000


# Over HTTP


def test_every_response_to_a_limited_key_has_its_limits(replica: Callable[..., Served]) -> None:
    """Rejections too; a change of the key applies on an open connection. Reserved tokens are returned."""
    live = LiveGateway()
    try:
        keys = KeyFile(Home(live.home).keys)
        _, text = keys.create("ci", allowance=Allowance(requests_per_minute=2, tokens_per_minute=1000))
        live.serve(routes("m", replica()))

        def ask(**fields: Any) -> httpx.Response:
            body = {"model": "m", "prompt": "hello", "max_tokens": 7, **fields}
            return live.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {text}"})

        until(lambda: live.http.get("/v1/models").status_code == 401, 5, "a key is demanded")
        first, second, third = ask(), ask(stream=True, max_tokens=900), ask()
        assert [answer.status_code for answer in (first, second, third)] == [200, 200, 429]
        assert third.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(third.headers["retry-after"]) <= 30
        assert [answer.headers["x-ratelimit-limit-requests"] for answer in (first, second, third)] == ["2"] * 3
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in (first, second, third)] == [
            "1",
            "0",
            "0",
        ]
        assert int(second.headers["x-ratelimit-remaining-tokens"]) <= 95

        keys.change("ci", requests_per_minute=None)
        changed = until(lambda: answer if (answer := ask()).status_code == 200 else None, 5, "the limit is gone")
        assert "x-ratelimit-limit-requests" not in changed.headers
        assert ask(max_tokens=1500).json()["error"]["code"] == "over_rate_limit"
    finally:
        live.close()


def test_a_disconnected_client_frees_its_place(replica: Callable[..., Served]) -> None:
    """And its reservation."""
    live = LiveGateway()
    try:
        _, text = KeyFile(Home(live.home).keys).create("ci", allowance=Allowance(max_concurrent=1))
        live.serve(routes("m", replica(step_ms=50)))
        body = {"model": "m", "prompt": "hello", "max_tokens": 900, "stream": True}
        headers = {"Authorization": f"Bearer {text}"}

        def ask() -> int:
            return live.http.post("/v1/completions", json={**body, "max_tokens": 1}, headers=headers).status_code

        until(lambda: live.http.get("/v1/models").status_code == 401, 5, "a key is demanded")
        with live.http.stream("POST", "/v1/completions", json=body, headers=headers) as running:
            assert running.status_code == 200
            assert ask() == 429
        until(lambda: ask() == 200, 5, "its place is free")
    finally:
        live.close()


@pytest.mark.parametrize(
    ("path", "fields"),
    [("completions", {"model": "m", "prompt": "a" * 60}), ("embeddings", {"model": "e", "input": "a" * 60})],
)
def test_a_disconnected_client_pays_for_a_prompt_that_a_replica_has(
    path: str, fields: dict[str, str], replica: Callable[..., Served]
) -> None:
    """Also before the first token, or the embedding: the replica has begun to compute it."""
    live, served, encoder = LiveGateway(), replica(stepped=True), EncoderReplica(HeldEncoder())
    try:
        ci, text = KeyFile(Home(live.home).keys).create("ci", allowance=Allowance(tokens_per_minute=200))
        live.serve(routes("m", served), routes("e", encoder, kind="embedding", max_len=64))
        until(lambda: live.http.get("/v1/models").status_code == 401, 5, "a key is demanded")
        limits, body = live._server.gateway._limits, json.dumps(fields)
        with socket.create_connection(("127.0.0.1", live.port), timeout=10) as client:
            head = f"host: x\r\nauthorization: Bearer {text}\r\ncontent-length: {len(body)}"
            client.sendall(f"POST /v1/{path} HTTP/1.1\r\n{head}\r\n\r\n{body}".encode())
            until(lambda: served.batcher.stats.live or encoder.requests, 10, "a replica has the prompt")
        until(lambda: not limits._counts.live(), 10, "the request is over")
        assert int(limit_headers(limits, ci, time.monotonic())["x-ratelimit-remaining-tokens"]) < 200
    finally:
        live.close()
        encoder.close()


def test_tokens_of_encoded_inputs_count_towards_the_limit() -> None:
    """All of a request's inputs together; what is refused is not encoded."""
    live, encoder = LiveGateway(), EncoderReplica()
    try:
        _, text = KeyFile(Home(live.home).keys).create("ci", allowance=Allowance(tokens_per_minute=200))
        live.serve(routes("e", encoder, kind="embedding", max_len=64))

        def embed(*inputs: str) -> httpx.Response:
            headers = {"Authorization": f"Bearer {text}"}
            return live.http.post("/v1/embeddings", json={"model": "e", "input": inputs}, headers=headers)

        until(lambda: live.http.get("/v1/models").status_code == 401, 5, "a key is demanded")
        first, second = embed("a" * 60, "b" * 60), embed("a" * 60, "b" * 60)
        assert [first.status_code, second.status_code] == [200, 429]
        assert 80 <= int(first.headers["x-ratelimit-remaining-tokens"]) <= 85
        assert embed(*["c" * 60] * 4).status_code == 400  # never within the limit
        assert len(encoder.requests) == 1
    finally:
        live.close()
        encoder.close()


def test_the_retry_time_is_never_too_short(gateways: Callable[[], KeyLimits]) -> None:
    """Whole seconds, rounded up: a retry just then is accepted."""
    limits, ci = gateways(), key(requests_per_minute=7)  # one each 8.57 s
    for _ in range(7):
        limits.take(ci, 1, NOW)
    assert refusal(limits, ci).retry_after_s == 9
    assert limits.take(ci, 1, NOW + 9).reserved == 1
