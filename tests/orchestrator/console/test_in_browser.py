"""Every view of the console in headless Chromium: what it shows is what the admin API says, live and without errors."""

from __future__ import annotations

import copy
import re
import time
from pathlib import Path

import pytest
from playwright.sync_api import Route, expect

from orchestrator.api.schemas import OperationRefused
from orchestrator.console.fleet_feed import LiveView
from tests.fleet import until
from tests.orchestrator.console.conftest import Visit
from tests.orchestrator.fakefleet import PLAN, SPEC, LiveAdmin, bad_spec, event

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


def test_a_model_is_scaled_after_its_preview_and_at_its_index(admin: LiveAdmin, visit: Visit, pictures: Path) -> None:
    page = visit()
    page.get_by_role("link", name="Models").click()
    page.screenshot(path=pictures / "models.png")
    page.get_by_role("button", name="Scale chat").click()
    page.get_by_label("Replicas, at most 2").fill("1")
    expect(page.get_by_role("dialog")).to_contain_text("check index 41")
    page.screenshot(path=pictures / "models-scale.png")
    assert not [call for call in admin.fleet.calls if call[0] == "scale"]
    page.get_by_role("button", name="Scale", exact=True).click()
    expect(page.get_by_role("dialog")).to_be_hidden()
    assert [call for call in admin.fleet.calls if call[0] == "scale"] == [("scale", "chat", 1, "console", 41)]


@pytest.mark.parametrize(
    ("button", "confirm", "call"),
    [
        ("Load small", "Load", ("load", "small", "console", 41)),
        ("Unload chat", "Unload", ("unload", "chat", "console", 41)),
        ("Restart chat", "Restart", ("restart", "chat", "console", 41)),
        ("Drain chat/0", "Drain", ("drain", "chat/0", "console", 41)),
        ("Roll back", "Roll back", ("undo", 2, "console", 41)),
    ],
)
def test_each_change_is_previewed_then_made(
    button: str, confirm: str, call: tuple[object, ...], admin: LiveAdmin, visit: Visit
) -> None:
    page = visit()
    page.get_by_role("link", name="Models").click()
    page.get_by_role("button", name=button).click()
    expect(page.get_by_role("dialog")).to_contain_text("check index 41")
    page.get_by_role("dialog").get_by_role("button", name=confirm).click()
    expect(page.get_by_role("dialog")).to_be_hidden()
    assert call in admin.fleet.calls


def test_a_host_is_drained_after_its_preview(admin: LiveAdmin, visit: Visit) -> None:
    page = visit()
    page.get_by_role("button", name="Drain the host").click()
    expect(page.get_by_role("dialog")).to_contain_text("check index 41")
    page.get_by_role("dialog").get_by_role("button", name="Drain").click()
    expect(page.get_by_role("dialog")).to_be_hidden()
    assert ("drain", "inf2.48xlarge/0", "console", 41) in admin.fleet.calls


def test_a_roll_back_applies_the_revision_whose_plan_is_shown(admin: LiveAdmin, visit: Visit) -> None:
    """Also if the plan of the one that was chosen before arrives later."""
    page, late = visit(), list[Route]()

    def revision(route: Route) -> None:
        number = route.request.url.rpartition("/")[2]
        route.fulfill(json={"text": f"of {number}", "file": "old.yaml", "base_dir": "/specs"})

    def plan(route: Route) -> None:
        if "of 2" in (route.request.post_data or ""):
            late.append(route)
        else:
            route.continue_()

    page.route("**/admin/v1/revisions/*", revision)
    page.route("**/admin/v1/plan", plan)
    page.get_by_role("link", name="Models").click()
    with page.expect_request(lambda request: "of 2" in (request.post_data or "")):
        page.get_by_role("button", name="Roll back").click()
    page.get_by_label("Apply again").select_option("1")
    confirm = page.get_by_role("dialog").get_by_role("button", name="Roll back")
    expect(confirm).to_be_enabled()
    with page.expect_response("**/admin/v1/plan"):
        late[0].fulfill(json={**PLAN, "index": 99})
    confirm.click()
    expect(page.get_by_role("dialog")).to_be_hidden()
    assert ("undo", 1, "console", 41) in admin.fleet.calls


def test_a_key_with_other_characters_is_asked_for_again(visit: Visit) -> None:
    """Such as the sign for more, of a shortened copy."""
    page = visit()
    page.reload()
    page.get_by_label("Token of the fleet").fill("secr\u2026")
    page.keyboard.press("Enter")
    expect(page.get_by_text("A key has only ASCII characters")).to_be_visible()


def test_an_edited_address_shows_the_view(visit: Visit) -> None:
    """Also one that is not a valid encoding, or names what every object has."""
    page = visit()
    for edited in ("#cores/%", "#constructor"):
        page.goto(page.url.partition("#")[0] + edited)
        expect(page.get_by_role("link", name="Cores")).to_have_attribute("aria-current", "page")


def test_escape_closes_a_dialog_and_changes_nothing(admin: LiveAdmin, visit: Visit) -> None:
    page = visit()
    page.get_by_role("link", name="Models").click()
    page.get_by_role("button", name="Unload chat").click()
    expect(page.get_by_role("dialog")).to_contain_text("check index 41")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    assert {call[0] for call in admin.fleet.calls} <= {"events", "propose", "preview"}


def test_a_spec_is_planned_then_applied_at_the_index_of_the_plan(
    admin: LiveAdmin, visit: Visit, pictures: Path
) -> None:
    """The plan is the controller's; what was edited since cannot be applied."""
    page = visit()
    page.get_by_role("link", name="Plan").click()
    editor = page.get_by_label("Spec, relative to /specs")
    expect(editor).to_have_value(SPEC)
    text = SPEC.replace("512", "1024")
    editor.fill(text)
    expect(page.get_by_role("button", name="Apply")).to_be_disabled()
    page.get_by_role("button", name="Plan", exact=True).click()
    result = page.get_by_role("region", name="Plan")
    expect(result).to_contain_text("chat: replace restart replicas 2")
    expect(result.get_by_role("img", name="after: chat/0 on 0-7, chat/1 on 8-15, small/0 on 16")).to_be_visible()
    page.screenshot(path=pictures / "plan.png")
    page.get_by_role("button", name="Apply").click()
    expect(result).to_contain_text("Revision 3 is rolled out.")
    applied = ("apply", text, "old.yaml", "/specs", "console", "apply", 41, None)
    assert applied in admin.fleet.calls


def test_a_problem_leads_to_its_line(admin: LiveAdmin, visit: Visit, pictures: Path) -> None:
    page = visit()
    page.get_by_role("link", name="Plan").click()
    expect(page.get_by_label("Spec, relative to /specs")).to_have_value(SPEC)
    admin.fleet.refusal = bad_spec()
    page.get_by_role("button", name="Plan", exact=True).click()
    page.get_by_role("button", name="line 5").click()
    selected = "(field) => field.value.slice(field.selectionStart, field.selectionEnd)"
    assert page.get_by_label("Spec, relative to /specs").evaluate(selected) == SPEC.splitlines()[4]
    expect(page.locator(".lines li.bad")).to_have_text("5")
    page.screenshot(path=pictures / "plan-problem.png")
    admin.fleet.refusal = None


def test_keys_of_the_schema_are_offered(visit: Visit) -> None:
    """Those that may stand at the caret and are not there yet."""
    page = visit()
    page.get_by_role("link", name="Plan").click()
    editor = page.get_by_label("Spec, relative to /specs")
    editor.fill("models:\n  chat:\n    tp_degree: 2\n    tp")
    offers = page.get_by_role("list", name="Completions")
    expect(offers).to_have_count(0)
    editor.fill("models:\n  chat:\n    engine: echo\n    tp")
    expect(offers).to_be_visible()
    page.keyboard.press("Alt+ArrowDown")
    page.keyboard.press("Enter")
    expect(editor).to_have_value("models:\n  chat:\n    engine: echo\n    tp_degree: ")


def test_an_apply_after_another_change_shows_the_new_plan(admin: LiveAdmin, visit: Visit) -> None:
    page = visit()
    page.get_by_role("link", name="Plan").click()
    page.get_by_role("button", name="Plan", exact=True).click()
    apply = page.get_by_role("button", name="Apply")
    expect(apply).to_be_enabled()

    async def refused(*_: object, **__: object) -> dict[str, object]:
        raise OperationRefused("index-changed", "the fleet's index is 42, not 41", "run corewright plan SPEC again")

    admin.fleet.apply = refused  # type: ignore[method-assign]
    apply.click()
    expect(page.get_by_role("region", name="Plan")).to_contain_text("so nothing was applied")


def test_a_request_shows_its_decision_and_is_cancelled(admin: LiveAdmin, visit: Visit, pictures: Path) -> None:
    page = visit()
    page.get_by_role("link", name="Requests").click()
    running = page.get_by_role("row", name="r-1")
    expect(running).to_contain_text("key alice")
    expect(running).to_contain_text("slot 3 of 8, 1 with a free slot, for its session")
    expect(page.get_by_role("row", name="r-2")).to_contain_text("waiting")
    page.screenshot(path=pictures / "requests.png")
    page.get_by_role("button", name="Cancel r-2").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel the request").click()
    expect(page.get_by_role("row", name="r-2")).to_have_count(0)
    assert ("cancel_request", "r-2", "console") in admin.fleet.calls


def test_requests_are_only_read_while_their_view_is_open(admin: LiveAdmin, visit: Visit) -> None:
    """Reports of gateways stay small otherwise."""
    watched: list[bool] = []
    live = admin.fleet.live

    def noted(with_requests: bool) -> LiveView:
        watched.append(with_requests)
        return live(with_requests)

    admin.fleet.live = noted  # type: ignore[method-assign]
    page = visit()
    page.get_by_role("link", name="Requests").click()
    until(lambda: watched and watched[-1], 10, "the requests are read")
    page.get_by_role("link", name="Cores").click()
    until(lambda: not watched[-1], 10, "they are not read any more")


def test_events_are_filtered(admin: LiveAdmin, visit: Visit, pictures: Path) -> None:
    page = visit()
    page.get_by_role("link", name="Events").click()
    rows = page.get_by_role("region", name="Events").get_by_role("row")
    expect(rows).to_have_count(5)
    page.screenshot(path=pictures / "events.png")
    page.get_by_label("Level").select_option("errors")
    expect(rows).to_have_count(2)
    page.get_by_label("Level").select_option("all")
    page.get_by_label("Filter").fill("cordoned ada")
    expect(rows).to_have_count(2)
    admin.tell(event(13, "Cordoned", "cores 1-2 by ada@wright", host="inf2.48xlarge/0"))
    expect(rows).to_have_count(3)


def test_the_last_hour_is_plotted(admin: LiveAdmin, visit: Visit, pictures: Path) -> None:
    """Each figure with its last value as text, for those who do not see the line; each new sample is shown."""
    page = visit()
    page.get_by_role("link", name="Plots").click()
    expect(page.get_by_role("img", name="Tokens per second: chat 5")).to_be_visible()
    expect(page.locator("canvas")).to_have_count(7)
    page.screenshot(path=pictures / "plots.png", full_page=True)
    admin.fleet.told_history["models"]["chat"]["tokens_per_s"][-1] = 99.0
    admin.fleet.told_live["load"]["chat"]["queue"] = 2  # the next sample
    expect(page.get_by_role("img", name="Tokens per second: chat 99")).to_be_visible()


def test_a_replica_links_to_its_actor_and_log_in_ray(visit: Visit) -> None:
    page = visit()
    page.get_by_role("button", name="core 0, chat/0, ready").click()
    actor = page.get_by_role("link", name="Ray: actor")
    expect(actor).to_have_attribute("href", "http://127.0.0.1:8265/#/actors/a1b2c3")
    log = "http://127.0.0.1:8265/#/logs/viewer?nodeId=d4e5f6&fileName=replica-chat-0.log"
    expect(page.get_by_role("link", name="Ray: log")).to_have_attribute("href", log)


def test_the_log_of_a_replica_follows(admin: LiveAdmin, visit: Visit) -> None:
    page = visit()
    page.get_by_role("link", name="Models").click()
    page.get_by_role("button", name="Log of chat/0").click()
    log = page.locator("pre.log")
    expect(log).to_contain_text("ready")
    admin.fleet.log += b"one more line\n"
    expect(log).to_contain_text("one more line")
    page.keyboard.press("Escape")
    expect(log).to_be_hidden()


def test_a_load_shows_its_phase_and_the_time_that_is_left(admin: LiveAdmin, visit: Visit) -> None:
    """By the longest of the model's last loads; the page counts down without news of the fleet."""
    starting = copy.deepcopy(admin.fleet.told_status)
    starting["models"][0]["replicas"][0].update(state="loading", phase="weights", since=time.time())
    starting["models"][0]["replicas"][1].update(load_s=101.5)  # 1.5 s of which are before its process
    admin.fleet.told_status = starting
    page = visit()
    core = page.get_by_role("button", name="core 0, chat/0, loading")
    expect(core.get_by_role("progressbar")).to_be_visible()
    core.click()
    details = page.get_by_role("region", name="Details of inf2.48xlarge/0")
    expect(details).to_contain_text(re.compile(r"loading: weights, 9\d\.\d s left"))
    before = details.inner_text()
    expect(details).not_to_have_text(before, use_inner_text=True)


def test_hover_shows_what_selection_shows(visit: Visit) -> None:
    """As lines, in the same order."""
    page = visit()
    core = page.get_by_role("button", name="core 3, chat/0, ready")
    core.click()
    expect(page.get_by_text("threads", exact=True)).to_be_visible()  # the plan has come
    details = page.get_by_role("region", name="Details of inf2.48xlarge/0")
    title = core.get_attribute("title") or ""
    for text in (*details.locator("dd").all_inner_texts(), *details.locator("tbody td").all_inner_texts()):
        assert text in title
    assert title.startswith("Core 3\nstate: ready\nreplica: chat/0\n")


@pytest.mark.parametrize(("compiled", "shown"), [((False, False), "NEFF hit"), ((True, False), "NEFF hit by 1 of 2")])
def test_the_models_view_shows_hits_of_the_neff_cache(
    compiled: tuple[bool, bool], shown: str, admin: LiveAdmin, visit: Visit
) -> None:
    """And what a start costs, with its longest phases."""
    for replica, has in zip(admin.fleet.told_status["models"][0]["replicas"], compiled, strict=True):
        replica["compiled"] = has
    page = visit()
    page.get_by_role("link", name="Models").click()
    row = page.get_by_role("region", name="Models", exact=True).get_by_role("row").filter(has_text="chat")
    expect(row).to_contain_text(shown)
    expect(row).to_contain_text("4.2 s to load")
    expect(page.get_by_role("row").filter(has_text="chat/0")).to_contain_text(
        "imports 2.0 s, process 1.1 s, weights 0.5 s"
    )
