"""What people need of the console's page: axe-core finds nothing serious in any view, in light and dark, on a phone and
on a wall, by keyboard alone, and a hundred hosts stay readable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.orchestrator.console.conftest import Visit
from tests.orchestrator.fakefleet import LiveAdmin, replica

pytestmark = pytest.mark.browser

VIEWS = ("Cores", "Models", "Plan", "Requests", "Events", "Playground", "Plots")
STATES = ("ready", "ready", "ready", "loading", "draining", "failed")


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


def hundred_hosts(status: dict[str, Any]) -> None:
    """Makes a status one of a hundred hosts and twelve models. Some replicas load, drain or have failed; one host is
    lost, another is cordoned."""
    chat, host = status["models"][0], status["hosts"][0]
    names = [f"model-{number}" for number in range(12)]
    status["models"] = [{**chat, "name": name, "state": "ready", "reason": None, "replicas": []} for name in names]
    status["hosts"] = []
    for number in range(100):
        model = status["models"][number % 12]
        held = [
            replica(f"{model['name']}/{number * 3 + place}", f"{place * 8}-{place * 8 + 7}", state)
            for place, state in enumerate((STATES[number % 6], "ready"))
        ]
        name = f"inf2.48xlarge/{number}"
        model["replicas"] += [{**each, "host": name} for each in held]
        leases = [{"replica": each["id"], "cores": each["cores"]} for each in held]
        status["hosts"].append(
            {
                **host,
                "name": name,
                "leases": leases,
                "free": 8,
                "free_cordoned": 0,
                "quarantined": 0,
                "quarantine": [],
                "cordoned": "all" if number == 7 else [],
                "lost": number == 42,
            }
        )


@pytest.mark.parametrize("width", [390, 1280, 3840])
def test_a_hundred_hosts_stay_readable(width: int, admin: LiveAdmin, visit: Visit, pictures: Path) -> None:
    """An overview, a filter over hosts, models and states, and one host whole."""
    hundred_hosts(admin.fleet.told_status)
    page = visit(width)
    tiles = page.get_by_role("listitem").filter(has=page.locator("a.tile"))
    expect(tiles).to_have_count(100)
    expect(page.get_by_text("100 hosts, 2400 cores: 1600 in use, 800 free")).to_be_visible()
    page.screenshot(path=pictures / f"hosts-{width}.png", full_page=width > 400)
    page.get_by_label("Filter").fill("failed model-5")
    expect(page.get_by_text(" shown")).to_contain_text("8 shown")
    page.get_by_label("Filter").fill("lost")
    expect(tiles).to_have_count(1)
    page.get_by_role("link", name="inf2.48xlarge/42").click()
    expect(page.get_by_role("heading", name="inf2.48xlarge/42")).to_contain_text("lost")
    expect(page.get_by_role("button", name="core 8, model-6/127, ready")).to_be_visible()
    page.get_by_role("link", name="all 100 hosts").click()
    expect(page.get_by_label("Filter")).to_have_value("lost")


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
    """The page says since when it shows the past."""
    page = visit()
    admin.close()
    expect(page.locator("#connection")).to_contain_text("the page shows the past")
    restarted = LiveAdmin(admin.port)
    expect(page.locator("#connection")).to_have_text("live")
    restarted.close()
