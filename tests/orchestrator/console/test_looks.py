"""What people need of the console's page: axe-core finds nothing serious in any view, in light and dark, on a phone and
on a wall, by keyboard alone, and a hundred hosts stay readable."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.orchestrator.console.conftest import Visit
from tests.orchestrator.fakefleet import LiveAdmin
from tests.orchestrator.fakes import FakeCluster, Played, virtually

pytestmark = pytest.mark.browser

VIEWS = ("Cores", "Models", "Plan", "Requests", "Events", "Playground", "Plots")


def serious(page: Page) -> list[str]:
    """The findings of axe-core that keep somebody from using the page."""
    found = Axe().run(page).response["violations"]
    return [
        f"{each['id']}: {node['html'][:200]} {node.get('failureSummary', '')[:300]}"
        for each in found
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 800), (3840, 2160)], ids=["phone", "desk", "wall"])
def test_no_view_has_a_serious_problem(width: int, height: int, scheme: str, visit: Visit, pictures: Path) -> None:
    """And none is wider than its window: on a phone only tables and editors scroll sideways, within themselves."""
    page = visit(width, height, scheme, bypass_csp=True)  # for axe-core, which is not of this page
    found: dict[str, Any] = {}
    for view in VIEWS:
        page.get_by_role("link", name=view).click()
        page.locator("main :is(section, .card)").first.wait_for()
        if view == "Cores":
            page.get_by_role("button", name="core 0, chat/0").click()
        if view == "Plan":
            page.get_by_role("button", name="Plan", exact=True).click()
            expect(page.get_by_role("region", name="Plan")).to_contain_text("check index")
        page.screenshot(path=pictures / f"{view.lower()}-{width}-{scheme}.png", full_page=True)
        found[view] = serious(page)
        overflow = page.evaluate("() => document.documentElement.scrollWidth - innerWidth")
        assert overflow <= 0, f"{view} is {overflow} pixels wider than its window"
    page.get_by_role("link", name="Models").click()
    page.get_by_role("button", name="Scale chat").click()
    expect(page.get_by_role("dialog")).to_contain_text("check index")
    found["dialog"] = serious(page)
    assert found == {name: [] for name in (*VIEWS, "dialog")}


def test_the_table_of_models_fits_a_narrow_desktop(visit: Visit) -> None:
    """All buttons are in sight, so that only phones scroll it sideways."""
    page = visit(1180, 640)
    page.get_by_role("link", name="Models").click()
    table = page.get_by_role("region", name="Models", exact=True)
    table.wait_for()
    assert table.evaluate("table => table.scrollWidth - table.clientWidth") == 0


def hundred_hosts(home: Path) -> dict[str, Any]:
    """The status of a real controller with a hundred hosts and twelve models, on a fake cluster. Some of its replicas
    then load, drain or have failed; one host is lost."""
    models = "".join(f"  model-{n}: {{tp_degree: {(8, 2)[n % 2]}, replicas: 12}}\n" for n in range(12))
    spec = f"hosts: {{emulate: inf2.48xlarge, count: 100}}\ndefaults: {{engine: echo}}\nmodels:\n{models}"

    async def story() -> dict[str, Any]:
        async with Played(home, FakeCluster(), spec) as fleet:
            await fleet.settled()
            status: dict[str, Any] = msgspec.to_builtins(fleet.controller.status())
            return status

    with ThreadPoolExecutor(1) as thread:  # Playwright has an event loop in this one
        status: dict[str, Any] = thread.submit(virtually, story).result()
    for model in status["models"]:
        for replica, state in zip(model["replicas"], ("loading", "draining", "failed"), strict=False):
            replica["state"] = state
    status["hosts"][42]["lost"] = True
    return status


@pytest.mark.parametrize("width", [390, 1280, 3840])
def test_a_hundred_hosts_stay_readable(
    width: int, admin: LiveAdmin, visit: Visit, pictures: Path, tmp_path: Path
) -> None:
    """An overview, a filter over hosts, models and states, and one host whole."""
    admin.fleet.told_status = status = hundred_hosts(tmp_path)
    leased, free = (sum(host[key] for host in status["hosts"]) for key in ("leased", "free"))
    page = visit(width)
    tiles = page.get_by_role("listitem").filter(has=page.locator("a.tile"))
    expect(tiles).to_have_count(100)
    expect(page.get_by_text(f"100 hosts, 2400 cores: {leased} in use, {free} free")).to_be_visible()
    page.screenshot(path=pictures / f"hosts-{width}.png", full_page=width > 400)
    failed = next(each for each in status["models"][4]["replicas"] if each["state"] == "failed")
    page.get_by_label("Filter").fill(f"failed {failed['id']}")
    expect(tiles).to_have_count(1)
    page.get_by_role("link", name=failed["host"]).click()
    first = failed["cores"].split("-")[0]
    expect(page.get_by_role("button", name=f"core {first}, {failed['id']}, failed")).to_be_visible()
    page.get_by_role("link", name="all 100 hosts").click()
    expect(page.get_by_label("Filter")).to_have_value(f"failed {failed['id']}")
    page.get_by_label("Filter").fill("lost")
    expect(tiles).to_have_count(1)
    expect(tiles).to_contain_text("inf2.48xlarge/42")


def test_everything_is_reached_by_keyboard(visit: Visit) -> None:
    """Tab goes through the views and every core, and the focus can be seen."""
    page = visit()
    reached: list[str] = []
    for _ in range(7 + 24):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("() => document.activeElement.ariaLabel ?? document.activeElement.textContent"))
        assert page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle") != "none"
    assert reached[:7] == list(VIEWS)
    assert reached[7].startswith("core 0,")
    assert len({each for each in reached if each.startswith("core ")}) == 24


def test_a_lost_controller_is_reported_and_found_again(admin: LiveAdmin, visit: Visit) -> None:
    """The page shows since when its data is out of date."""
    page = visit()
    admin.close()
    expect(page.locator("#connection")).to_contain_text("the data is out of date")
    restarted = LiveAdmin(admin.port)
    expect(page.locator("#connection")).to_have_text("live")
    restarted.close()
