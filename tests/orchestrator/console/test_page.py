"""The console's files and stream over HTTP, and what keeps pages of other origins away from the controller."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

import orchestrator.console.page as module
from orchestrator.api.routes import ROUTES
from orchestrator.cli.listing import TABLES
from orchestrator.console import fleet_feed
from orchestrator.console.fleet_feed import FleetFeed
from orchestrator.gateway.http.exchange import Request
from tests.fleet import until_async
from tests.orchestrator.fakefleet import TOKEN, FakeFleet, LiveAdmin, console_of, event

STATIC = Path(module.__file__).parent / "static"
KEY = {"authorization": f"Bearer {TOKEN}"}
DEADLINE_S = 60.0  # also on a loaded machine


@pytest.fixture
def http(admin: LiveAdmin) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=admin.url, timeout=DEADLINE_S) as client:
        yield client


@pytest.mark.parametrize("path", [str(path.relative_to(STATIC)) for path in STATIC.rglob("*") if path.is_file()])
def test_every_file_is_served_without_a_key_and_with_the_policy(path: str, http: httpx.Client) -> None:
    """The files have no secrets; the policy allows no inline script, no other origin and no frame."""
    answer = http.get(f"/console/{path}")
    assert answer.content == (STATIC / path).read_bytes()
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_page_is_at_console(http: httpx.Client) -> None:
    """With a slash at the end, since its files have relative addresses; so has the redirection, for a proxy's path."""
    assert http.get("/console").headers["location"] == "console/"
    answer = http.get("/console", follow_redirects=True)
    assert answer.url.path == "/console/"
    assert answer.headers["content-type"] == "text/html; charset=utf-8"


@pytest.mark.parametrize("path", ["../page.py", "%2e%2e/page.py", "static/app.js", "vendor/", "none.js"])
def test_no_other_file_is_served(path: str, http: httpx.Client) -> None:
    """An unknown path is that of a client without a key."""
    request = http.build_request("GET", f"/console/{path}")
    request.url = request.url.copy_with(raw_path=f"/console/{path}".encode())
    assert http.send(request).status_code == 401


def test_no_file_names_another_origin_or_has_inline_code() -> None:
    """The page works without a network, and its policy would block what is inline. Links in comments do not count."""
    page = (STATIC / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=|<style", page) == []
    for path in STATIC.glob("*.*"):
        if path.suffix != ".svg":
            assert re.findall(r"(?:https?:)?//[\w-]+\.\w", path.read_text()) == [], path.name


def test_the_page_calls_operations_by_their_names_in_the_table_of_routes(http: httpx.Client) -> None:
    """It gets their methods and paths with its facts; no script has a path of its own."""
    scripts = "".join(path.read_text() for path in STATIC.glob("*.js"))
    called = set(re.findall(r"""\b(?:call|changeOrPreview)\("(\w+)\"""", scripts))
    called |= set(re.findall(r'^  (\w+): \{ title: "\w+"', scripts, re.MULTILINE))
    calls = http.get("/console/facts.json").json()["calls"]
    assert calls == {route.name: {"method": route.method, "path": route.path} for route in ROUTES}
    assert {"propose", "revision", "drain", "undo", "load_history"} < called <= calls.keys()
    assert scripts.count("admin/v1") == 1


def test_the_page_has_the_columns_of_the_commands(http: httpx.Client) -> None:
    """One description serves both; the page knows how to show each value that it gets."""
    tables = http.get("/console/facts.json").json()["tables"]
    for kind, shown in tables.items():
        titles = [column["title"].upper() for column in shown]
        assert [title for title in TABLES[kind].header(wide=True) if title in titles] == titles
    known = re.search(r"const FORMATS = \{(.*?)\};", (STATIC / "columns.js").read_text(), re.DOTALL)
    assert known is not None
    formats = set(re.findall(r"^  (\w+)", known[1], re.MULTILINE))
    assert {column["format"] for shown in tables.values() for column in shown} == formats


def test_no_script_of_ours_parses_html() -> None:
    """Foreign text can only become text nodes and attributes."""
    for path in STATIC.glob("*.js"):
        assert (
            re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\bFunction\(", path.read_text())
            == []
        )


def test_the_key_is_stored_nowhere() -> None:
    """Neither in storage nor in a cookie nor in an address."""
    for path in STATIC.glob("*.js"):
        assert re.findall(r"localStorage|sessionStorage|indexedDB|document\.cookie|caches\.", path.read_text()) == []


def test_the_stream_needs_a_key(http: httpx.Client) -> None:
    assert http.get("/console/stream").status_code == 401


class Stream:
    """What a page reads of the stream."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.iter_lines()

    def next(self, kind: str) -> Any:
        """Returns the data of the next message of that kind."""
        for line in self._lines:
            if line == f"event: {kind}":
                return json.loads(next(self._lines).removeprefix("data: "))
        raise AssertionError("the stream has ended")


def test_a_page_gets_everything_then_only_what_changes(admin: LiveAdmin, http: httpx.Client) -> None:
    with http.stream("GET", "/console/stream", headers=KEY) as response:
        stream = Stream(response)
        whole = stream.next("state")
        assert list(whole["models"]) == whole["fleet"]["models"] == ["chat", "small"]
        assert list(whole["hosts"]) == ["inf2.48xlarge/0"]
        assert [each["seq"] for each in stream.next("events")] == [5, 8, 9, 12]
        changed = copy.deepcopy(admin.fleet.told_status)
        changed["models"][0]["replicas"][0]["state"] = "draining"
        admin.call_soon(lambda: setattr(admin.fleet, "told_status", changed))
        part = stream.next("state")
    assert list(part) == ["models"]
    assert part["models"]["chat"]["replicas"][0]["state"] == "draining"
    assert list(part["models"]) == ["chat"]


def test_an_event_is_pushed_when_it_happens(admin: LiveAdmin, http: httpx.Client) -> None:
    with http.stream("GET", "/console/stream", headers=KEY) as response:
        stream = Stream(response)
        stream.next("events")
        admin.tell(event(13, "Ready", "after 1 s", model="chat"))
        (fresh,) = stream.next("events")
    assert (fresh["seq"], fresh["reason"]) == (13, "Ready")


def test_several_pages_share_one_reading(admin: LiveAdmin, http: httpx.Client) -> None:
    """The status of a hundred hosts is built once a second, however many pages are open."""
    with http.stream("GET", "/console/stream", headers=KEY) as first:
        Stream(first).next("events")
        with http.stream("GET", "/console/stream", headers=KEY) as second:
            assert Stream(second).next("state")["fleet"]["name"] == "two"
            assert [call for call in admin.fleet.calls if call[:2] == ("events", 0)] == [("events", 0, 1000, 0.0, None)]


class Written:
    """An exchange that keeps what is written to its page."""

    def __init__(self) -> None:
        self.request = Request("GET", "/console/stream", "", {}, b"", "1.1", True, 0.0)
        self.pieces: list[bytes] = []
        self.ended = False

    def begin(self, status: int, headers: Any, first: bytes) -> None:
        self.write(first)

    def write(self, piece: bytes) -> None:
        self.pieces.append(piece)

    def end(self) -> None:
        self.ended = True

    def has(self, part: bytes) -> bool:
        return any(part in piece for piece in self.pieces)


async def test_a_page_after_others_gets_everything() -> None:
    """Also the first one after a while without any page, when the reading begins anew. No piece is empty, which would
    end the answer."""
    feed = FleetFeed(console_of(FakeFleet()))
    for _ in range(2):
        page = Written()
        stream = asyncio.ensure_future(feed.stream(page, lambda: True))  # type: ignore[arg-type]
        await until_async(partial(page.has, b"event: state"), DEADLINE_S, "the page has the state")
        assert b"" not in page.pieces
        stream.cancel()
        await until_async(lambda: not feed.reads, DEADLINE_S, "nothing is read any more")


@pytest.mark.parametrize("reason", ["the key is revoked", "the page is gone"])
async def test_a_stream_without_a_key_or_a_page_ends(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the next piece, which is at most a ping later; also if the cancellation by a page that has gone is lost."""
    monkeypatch.setattr(fleet_feed, "PING_S", 0.05)
    feed, page, keys = FleetFeed(console_of(FakeFleet())), Written(), ["the key"]
    stream = asyncio.ensure_future(feed.stream(page, lambda: bool(keys)))  # type: ignore[arg-type]
    await until_async(partial(page.has, b"event: state"), DEADLINE_S, "the page has the state")
    assert not page.ended
    if reason == "the page is gone":
        page.ended = True
    else:
        keys.clear()
    await asyncio.wait_for(stream, DEADLINE_S)
    assert page.ended
    await until_async(lambda: not feed.reads, DEADLINE_S, "nothing is read any more")
