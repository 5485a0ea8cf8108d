"""The playground's way to the gateway: streamed, with the key of its user, and without the console's."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest
from playwright.sync_api import expect

from orchestrator.console.page import PLAYGROUND_PATH, Entrance
from tests.fleet import until
from tests.orchestrator.console.conftest import Visit
from tests.orchestrator.fakefleet import TOKEN, LiveAdmin
from tests.orchestrator.gateways import LiveGateway, routes
from tests.served import Served

KEY = {"authorization": f"Bearer {TOKEN}"}
BODY = {"model": "chat", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 50, "stream": True}


@pytest.fixture
def playground(admin: LiveAdmin, gateway: LiveGateway, replica: Callable[..., Served]) -> LiveAdmin:
    gateway.serve(routes("chat", replica()), routes("small", replica()))
    admin.fleet.told_entrance = Entrance(gateway.url, nearby=True)
    return admin


def test_a_chat_is_streamed_through_the_controller(playground: LiveAdmin) -> None:
    """With the gateway's headers about its replica and its decision."""
    with httpx.stream("POST", playground.url + PLAYGROUND_PATH, json=BODY, headers=KEY) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-corewright-replica"] == "chat/0"
    assert "slot=1/4" in answer.headers["x-corewright-decision"]
    assert lines[-1] == "[DONE]"
    assert "".join(json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines[:-1])


def test_the_way_to_the_gateway_needs_the_consoles_key(playground: LiveAdmin) -> None:
    """Otherwise it would lead around a gateway's client certificates."""
    assert httpx.post(playground.url + PLAYGROUND_PATH, json=BODY).status_code == 401


def test_an_error_of_the_gateway_is_passed_on(playground: LiveAdmin) -> None:
    answer = httpx.post(playground.url + PLAYGROUND_PATH, json={**BODY, "model": "none"}, headers=KEY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_without_a_gateway_it_says_so(admin: LiveAdmin) -> None:
    answer = httpx.post(admin.url + PLAYGROUND_PATH, json=BODY, headers=KEY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "gateway_unreachable")
    admin.fleet.told_entrance = Entrance("http://127.0.0.1:1", nearby=True)
    answer = httpx.post(admin.url + PLAYGROUND_PATH, json=BODY, headers=KEY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "gateway_unreachable")


def test_a_page_that_leaves_ends_its_request(
    admin: LiveAdmin, gateway: LiveGateway, replica: Callable[..., Served]
) -> None:
    gateway.serve(routes("chat", replica(step_ms=20.0)))
    admin.fleet.told_entrance = Entrance(gateway.url, nearby=True)
    body = {**BODY, "messages": [{"role": "user", "content": "a" * 500}], "max_tokens": 2000}
    with httpx.stream("POST", admin.url + PLAYGROUND_PATH, json=body, headers=KEY) as answer:
        lines = answer.iter_lines()  # kept: httpx hangs up when its iterator is collected
        next(lines)
        assert gateway.queue("chat").links.live == 1
    until(lambda: gateway.queue("chat").links.live == 0, 10, "the slot is free")


@pytest.mark.browser
def test_two_models_answer_side_by_side(playground: LiveAdmin, visit: Visit, pictures: object) -> None:
    page = visit()
    page.get_by_role("link", name="Playground").click()
    page.get_by_label("Second model").select_option("small")
    page.get_by_label("Prompt").fill("What is a NeuronCore?")
    page.keyboard.press("Control+Enter")
    for side in ("Left", "Right"):
        answers = page.get_by_role("region", name=side)
        expect(answers.locator("pre.answer")).not_to_be_empty()
        expect(answers).to_contain_text("first token after")
        expect(answers).to_contain_text("tokens/s")
    page.screenshot(path=f"{pictures}/playground.png")
