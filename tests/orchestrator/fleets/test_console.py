"""The console of a real fleet, in headless Chromium: the demo's cores, a chat, a killed replica, and the ways to Ray's
dashboard and back."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Page, expect, sync_playwright

from orchestrator.process.home import Home
from tests.fleet import LiveFleet, until

pytestmark = pytest.mark.browser

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
PAGE_MS = 40_000.0  # two cores
BACK_MS = 90_000.0
BODY = {"model": "assistant", "prompt": "What is a NeuronCore?", "max_tokens": 30}


@pytest.fixture(scope="module")
def fleet() -> Iterator[LiveFleet]:
    with LiveFleet(None, arguments=("--dashboard",)) as live:
        yield live.wait_ready()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("console")


@pytest.fixture(scope="module")
def page(fleet: LiveFleet) -> Iterator[Page]:
    """The console, opened by what `corewright console` prints."""
    if not CHROMIUM.exists():
        pytest.fail(f"there is no {CHROMIUM}: apt-get install -y --no-install-recommends chromium")
    problems: list[str] = []
    printed = fleet.corewright("console").stdout.split()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
        page.set_default_timeout(PAGE_MS)
        expect.set_options(timeout=PAGE_MS)
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(printed[1])
        page.get_by_label("Token of the fleet").fill(printed[3])
        page.keyboard.press("Enter")
        page.get_by_text("live", exact=True).wait_for()
        yield page
        browser.close()
        expect.set_options(timeout=None)
    assert problems == []


def view(page: Page, name: str) -> None:
    page.get_by_role("link", name=name, exact=True).click()


def test_up_prints_the_address_of_the_console(fleet: LiveFleet) -> None:
    record = Home(fleet.home).read_record()
    assert record is not None
    assert f"console      {record.admin_url}/console/" in fleet.output()


def test_the_cores_are_those_of_the_fleet(page: Page, pictures: Path) -> None:
    """With threads and memory by class, as the plan has them."""
    page.get_by_role("button", name="core 9, helpdesk/0, ready").click()
    details = page.get_by_role("region", name="Details of inf2.48xlarge/0")
    expect(details).to_contain_text("1 thread")
    expect(details.get_by_role("row", name="scratch")).to_contain_text("1.00 GiB")
    page.screenshot(path=pictures / "live-cores.png")


def test_two_models_answer_in_the_playground(page: Page, pictures: Path) -> None:
    view(page, "Playground")
    page.get_by_label("Second model").select_option("helpdesk")
    page.get_by_label("Prompt").fill("What is a NeuronCore?")
    page.get_by_role("button", name="Send").click()
    for side in ("Left", "Right"):
        expect(page.get_by_role("region", name=side).locator("pre.answer")).to_contain_text("NeuronCore is one")
        expect(page.get_by_role("region", name=side)).to_contain_text("tokens/s")
    page.screenshot(path=pictures / "live-playground.png")


def test_a_request_shows_where_it_was_served(page: Page, fleet: LiveFleet, pictures: Path) -> None:
    view(page, "Requests")

    def shown() -> bool:
        fleet.http.post("/v1/completions", json=BODY).raise_for_status()
        return page.get_by_role("row").filter(has_text="assistant/0").filter(has_text="slot 1 of 4").count() > 0

    until(shown, 30, "a request is listed with its decision")
    page.screenshot(path=pictures / "live-requests.png")


def test_the_load_is_sampled_and_plotted(page: Page, fleet: LiveFleet, pictures: Path) -> None:
    """Every ten seconds, with the latencies of the last minute."""
    view(page, "Plots")
    plot = page.get_by_role("img", name=re.compile("first token, p50, ms: .*assistant"))

    def sampled() -> bool:
        fleet.http.post("/v1/completions", json=BODY).raise_for_status()
        return plot.count() > 0

    until(sampled, 60, "the latency is plotted")
    page.screenshot(path=pictures / "live-plots.png")
    view(page, "Models")
    expect(page.get_by_role("row").filter(has_text="assistant").first).to_contain_text("ms /")
    page.screenshot(path=pictures / "live-models.png")


def test_scaling_down_is_previewed_then_done(page: Page, fleet: LiveFleet) -> None:
    view(page, "Models")
    page.get_by_role("button", name="Scale helpdesk").click()
    page.get_by_label("Replicas, at most 2").fill("1")
    expect(page.get_by_role("dialog")).to_contain_text("stop helpdesk/1")
    page.get_by_role("button", name="Scale", exact=True).click()
    until(lambda: fleet.replica("helpdesk/1")["state"] == "none", 60, "the replica is stopped")
    view(page, "Cores")
    expect(page.get_by_role("button", name="core 10, free")).to_be_visible()


def test_a_killed_replica_shows_without_a_reload(page: Page, fleet: LiveFleet) -> None:
    """The time from the kill to the page is reported; afterwards the page shows the new start, until it serves."""
    view(page, "Cores")
    core = page.locator('[data-core="12"]')
    expect(core).to_have_attribute("aria-label", "core 12, storyteller/0, ready")
    process = psutil.Process(fleet.replica("storyteller/0")["pid"])
    for warm in fleet.named_pids("fork_server"):  # a fork would be ready before the page draws again
        psutil.Process(warm).kill()
    killed_at = time.monotonic()
    process.kill()
    page.wait_for_function("() => !document.querySelector('[data-core=\"12\"]').ariaLabel.endsWith('ready')")
    seen_s = time.monotonic() - killed_at
    print(f"a killed replica shows after {seen_s:.2f} s")  # noqa: T201
    expect(core).to_have_attribute("aria-label", "core 12, storyteller/0, ready", timeout=BACK_MS)
    view(page, "Events")
    expect(page.get_by_role("region", name="Events")).to_contain_text("storyteller/0")


@pytest.mark.parametrize(
    ("link", "content"), [("Ray: actor", "/console/#cores/inf2.48xlarge%2F0"), ("Ray: log", "replica-assistant-0.log")]
)
def test_a_replica_links_into_rays_dashboard(link: str, content: str, page: Page, pictures: Path) -> None:
    """To the page of its actor, whose log has the way back, and to its log there."""
    view(page, "Cores")
    core = page.get_by_role("button", name="core 0, assistant/0, ready")
    if core.get_attribute("aria-pressed") == "false":
        core.click()
    with page.context.expect_page() as opened:
        page.get_by_role("link", name=link).click()
    other = opened.value
    expect(other.locator("body")).to_contain_text(content)
    other.screenshot(path=pictures / f"{link.replace(': ', '-')}.png")
    other.close()
