"""The console behind a proxy with TLS that serves it below a path, in headless Chromium."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from playwright.sync_api import Browser, expect

from orchestrator.process.addresses import free_port
from tests.orchestrator.certificates import Authority
from tests.orchestrator.console.conftest import CHROMIUM, FLAGS, PAGE_MS
from tests.orchestrator.fakefleet import TOKEN, LiveAdmin

pytestmark = pytest.mark.browser

NAME, BELOW = "ops.example", "/fleets/a"


class Proxy:
    """Passes what is below ``BELOW`` on to a controller, by HTTPS on a port of loopback."""

    def __init__(self, folder: Path, keeps_host: bool) -> None:
        """``keeps_host``: it passes the Host of the browser on, and not that of the controller."""
        self.port = free_port()
        self.console = f"https://{NAME}:{self.port}{BELOW}/console/"
        self.controller = ""  # its URL
        self._keeps_host = keeps_host
        pair = Authority(folder).sign("proxy", hosts=(NAME,))
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._tls.load_cert_chain(pair.cert, pair.key)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)

    async def _listen(self) -> None:
        self._client = aiohttp.ClientSession()
        app = web.Application()
        app.router.add_route("*", BELOW + "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(app, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self._tls).start()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        dropped = () if self._keeps_host else ("Host",)
        headers = {name: value for name, value in request.headers.items() if name not in dropped}
        address = self.controller + request.raw_path.removeprefix(BELOW)
        async with self._client.request(
            request.method, address, headers=headers, data=await request.read(), allow_redirects=False
        ) as answer:
            passed = {
                name: value for name, value in answer.headers.items() if name not in ("Transfer-Encoding", "Date")
            }
            response = web.StreamResponse(status=answer.status, headers=passed)
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            return response

    async def _close(self) -> None:
        await self._client.close()
        await self._runner.cleanup()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


@pytest.fixture(params=[True, False], ids=["the browser's Host", "the controller's Host"])
def proxy(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Proxy]:
    made = Proxy(tmp_path, request.param)
    yield made
    made.close()


@pytest.fixture
def admin(proxy: Proxy) -> Iterator[LiveAdmin]:
    """The API of a fleet with the proxy's address as its `console_url`."""
    live = LiveAdmin(console_url=proxy.console)
    proxy.controller = live.url
    yield live
    live.close()


def test_the_console_is_used_through_the_proxy(proxy: Proxy, admin: LiveAdmin, browser: Browser) -> None:
    """Logged in, live, and with a change that is previewed and then made."""
    rules = f"--host-resolver-rules=MAP {NAME} 127.0.0.1"
    chromium = browser.browser_type.launch(executable_path=CHROMIUM, args=[*FLAGS, rules])
    page = chromium.new_context(ignore_https_errors=True).new_page()
    page.set_default_timeout(PAGE_MS)
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.goto(proxy.console.removesuffix("/"))
    assert page.url.partition("#")[0] == proxy.console
    page.get_by_label("Token of the fleet").fill(TOKEN)
    page.keyboard.press("Enter")
    page.get_by_text("live", exact=True).wait_for()
    page.get_by_role("link", name="Models", exact=True).click()
    page.get_by_role("button", name="Unload chat").click()
    page.get_by_role("dialog").get_by_role("button", name="Unload", exact=True).click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert [call[:2] for call in admin.fleet.calls if call[0] == "unload"] == [("unload", "chat")]
    assert problems == []
    chromium.close()
