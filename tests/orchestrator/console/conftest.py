"""The console in headless Chromium, in front of a fleet that is played behind the real admin API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

from tests.orchestrator.fakefleet import TOKEN, LiveAdmin

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
PAGE_MS = 15_000.0
REFUSED = "Failed to load resource: the server responded with a status of 4"  # Chromium's own line for a refusal
AWAY = "Failed to load resource: net::ERR_"  # and for a controller that is away


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        pytest.fail(f"there is no {CHROMIUM}: apt-get install -y --no-install-recommends chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the screenshots, which pytest keeps."""
    return tmp_path_factory.mktemp("console")


Visit = Callable[..., Page]


@pytest.fixture
def visit(browser: Browser, admin: LiveAdmin) -> Iterator[Visit]:
    """Opens the console and logs in. At the end of the test no page may have logged an error."""
    problems: list[str] = []
    contexts = []

    def heard(message: ConsoleMessage) -> None:
        if message.type == "error" and not message.text.startswith((REFUSED, AWAY)):
            problems.append(message.text)

    def open_page(width: int = 1280, height: int = 800, scheme: str = "light", bypass_csp: bool = False) -> Page:
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=scheme,  # type: ignore[arg-type]
            reduced_motion="reduce",
            bypass_csp=bypass_csp,
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PAGE_MS)
        page.on("console", heard)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(f"{admin.url}/console")
        page.get_by_label("Token of the fleet").fill(TOKEN)
        page.keyboard.press("Enter")
        page.get_by_text("live", exact=True).wait_for()
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []
