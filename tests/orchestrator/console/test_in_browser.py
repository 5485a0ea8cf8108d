"""Every view of the console in headless Chromium: what it shows is what the admin API says, live and without errors."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.orchestrator.console.conftest import Visit
from tests.orchestrator.fakefleet import LiveAdmin, event

pytestmark = pytest.mark.browser


def test_the_cores_of_a_host_show_their_replicas(visit: Visit, pictures: Path) -> None:
    """Each core with its holder and state, and its numbers when it is selected by keyboard."""
    page = visit()
    held = page.get_by_role("button", name="core 3, chat/0, ready")
    held.focus()
    page.keyboard.press("Enter")
    expect(held).to_have_attribute("aria-pressed", "true")
    details = page.get_by_role("region", name="Details of inf2.48xlarge/0")
    expect(details).to_contain_text("0-7, 8 cores")
    expect(details).to_contain_text("3 running, 1 waiting")
    expect(page.get_by_role("button", name="core 16, free")).to_be_visible()
    expect(page.get_by_role("button", name="core 23, quarantined")).to_be_visible()
    page.screenshot(path=pictures / "cores.png")


def test_a_replica_that_fails_shows_without_a_reload(admin: LiveAdmin, visit: Visit) -> None:
    page = visit()
    expect(page.get_by_role("button", name="core 0, chat/0, ready")).to_be_visible()
    changed = copy.deepcopy(admin.fleet.told_status)
    changed["models"][0]["replicas"][0]["state"] = "failed"
    admin.call_soon(lambda: setattr(admin.fleet, "told_status", changed))
    admin.tell(event(13, "Failed", "replica-died: it was killed", level="error", model="chat", replica="chat/0"))
    expect(page.get_by_role("button", name="core 0, chat/0, failed")).to_be_visible()
    expect(page.locator("#news")).to_contain_text("Failed: replica-died")


def test_a_wrong_key_is_refused_and_can_be_corrected(admin: LiveAdmin, visit: Visit) -> None:
    page = visit()
    page.reload()  # the key was in the page's memory only
    page.get_by_label("Token of the fleet").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_text("The admin API needs the token")).to_be_visible()
