"""Attacks on the console in a real browser: foreign pages, rebound names, and foreign text that wants to be HTML."""

from __future__ import annotations

import copy
import functools
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from orchestrator.console.page import Entrance
from tests.orchestrator.console.conftest import CHROMIUM, FLAGS, Visit
from tests.orchestrator.fakefleet import TOKEN, LiveAdmin, event, live_request

pytestmark = pytest.mark.browser

HTML = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[str]:
    """The origin of a page that somebody else serves on this machine."""
    (tmp_path / "index.html").write_text("<!doctype html><title>foreign</title>")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()


SENDS = """async ([url, token, mode]) => {
    const headers = mode === "cors" ? {authorization: `Bearer ${token}`} : {};
    try {
        const change = {method: "POST", mode, headers, body: '{"model": "chat"}'};
        const answer = await fetch(`${url}/admin/v1/unload`, change);
        return answer.status;
    } catch (error) {
        return String(error);
    }
}"""


@pytest.mark.parametrize("mode", ["cors", "no-cors"])
def test_a_foreign_page_changes_nothing(mode: str, admin: LiveAdmin, browser: Browser, foreign: str) -> None:
    """Cross-site request forgery: even if it knows the key, and while the user is logged in elsewhere."""
    page = browser.new_page()
    page.goto(foreign)
    assert page.evaluate(SENDS, [admin.url, TOKEN, mode]) in (0, "TypeError: Failed to fetch")
    assert admin.fleet.calls == []
    page.close()


def test_a_foreign_page_cannot_frame_the_console(admin: LiveAdmin, browser: Browser, foreign: str) -> None:
    """Else it could have its visitors click on what they do not see."""
    page = browser.new_page()
    page.goto(foreign)
    frame = "(url) => { const frame = document.createElement('iframe'); frame.src = url; document.body.append(frame); }"
    with page.expect_event("framenavigated"):
        page.evaluate(frame, f"{admin.url}/console/")
    assert "corewright" not in page.frames[1].content()
    page.close()


def test_a_rebound_name_gets_nothing(admin: LiveAdmin, browser: Browser) -> None:
    """DNS rebinding: the attacker's name has become 127.0.0.1, and its page would be of the same origin."""
    rules = f"--host-resolver-rules=MAP rebound.example 127.0.0.1:{admin.port}"
    chromium = browser.browser_type.launch(executable_path=CHROMIUM, args=[*FLAGS, rules])
    page = chromium.new_page()
    answer = page.goto(f"http://rebound.example:{admin.port}/console/")
    assert answer is not None
    assert answer.status == 421
    read = "async (token) => (await fetch('/admin/v1/status', {headers: {authorization: `Bearer ${token}`}})).status"
    assert page.evaluate(read, TOKEN) == 421
    chromium.close()


def test_foreign_text_stays_text(admin: LiveAdmin, visit: Visit) -> None:
    """In the names of models, hosts and keys, in reasons, events and logs: in every view."""
    hostile = copy.deepcopy(admin.fleet.told_status)
    hostile["name"] = HTML
    for model in hostile["models"]:
        model["name"] = f"{model['name']}{HTML}"
        model["reason"] = HTML
        for replica in model["replicas"]:
            replica.update(reason=HTML, engine=HTML, id=f"{model['name']}/0")
    hostile["hosts"][0]["quarantine"][0]["command"] = HTML
    admin.fleet.told_status = hostile
    admin.fleet.told_requests = [live_request(HTML, key=HTML, replica=HTML)]
    admin.fleet.told_events = [event(1, HTML, HTML, model=HTML)]
    admin.fleet.told_history["models"] = {HTML: admin.fleet.told_history["models"]["chat"]}
    page = visit()
    for view in ("Cores", "Models", "Plan", "Requests", "Events", "Playground", "Plots"):
        page.get_by_role("link", name=view).click()
        expect(page).to_have_title(f"{view} · {HTML}")
        expect(page.locator("main :is(section, div, table, p)").first).to_be_visible()
        assert page.locator("img, main script").count() == 0
    page.get_by_role("link", name="Events").click()
    expect(page.get_by_role("cell", name="<script>").first).to_be_visible()


@pytest.fixture
def hostile_gateway() -> Iterator[str]:
    """The address of a server that answers every chat with HTML, in two pieces."""

    class Chat(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            for piece in (HTML[:9], HTML[9:]):
                chunk = {"choices": [{"delta": {"content": piece}}]}
                self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Chat)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_a_completion_stays_text(admin: LiveAdmin, visit: Visit, hostile_gateway: str) -> None:
    admin.fleet.told_entrance = Entrance(hostile_gateway, nearby=True)
    page = visit()
    page.get_by_role("link", name="Playground").click()
    page.get_by_label("Prompt").fill("hello")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("pre.answer")).to_have_text(HTML)
    expect(page).to_have_title("Playground · two")
    assert page.locator("img").count() == 0


def test_the_policy_stops_a_script_that_got_into_the_page(browser: Browser, admin: LiveAdmin) -> None:
    """The last line of defence: neither inline code nor HTML from text works in this page."""
    page = browser.new_page()
    page.goto(f"{admin.url}/console/")
    page.wait_for_selector("dialog[open]")
    inject = """() => {
        const script = document.createElement("script");
        try { script.text = "window.injected = true"; document.body.append(script); } catch {}
        try { document.body.insertAdjacentHTML("beforeend", "<p id=injected></p>"); } catch {}
        return [window.injected ?? null, document.getElementById("injected")];
    }"""
    assert page.evaluate(inject) == [None, None]
    page.close()


def test_a_console_in_another_tab_has_no_key(visit: Visit, admin: LiveAdmin) -> None:
    """The key is in the memory of one page: neither a second tab nor storage has it."""
    page = visit()
    stored = "() => JSON.stringify([localStorage, sessionStorage, document.cookie, location.href, history.state])"
    assert TOKEN not in page.evaluate(stored)
    other = page.context.new_page()
    other.goto(f"{admin.url}/console/")
    expect(other.get_by_label("Token of the fleet")).to_have_value("")
