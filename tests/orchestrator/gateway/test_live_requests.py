"""While an operator looks, gateways report their requests: where each waits or runs, and why. One can be cancelled."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import httpx

from tests.fleet import until
from tests.orchestrator.gateways import LiveGateway, routes
from tests.served import Served

LONG = {"model": "chat", "prompt": "a" * 40, "max_tokens": 2000, "stream": True}


class Asked:
    """A client that streams one completion in a thread."""

    def __init__(self, gateway: LiveGateway, id: str) -> None:
        self.lines: list[str] = []
        self.status = 0
        self._thread = threading.Thread(target=self._run, args=(gateway, id), daemon=True)
        self._thread.start()

    def _run(self, gateway: LiveGateway, id: str) -> None:
        headers = {"x-request-id": id}
        with httpx.stream("POST", f"{gateway.url}/v1/completions", json=LONG, headers=headers, timeout=30) as answer:
            self.status = answer.status_code
            self.lines += answer.iter_lines()

    def join(self) -> None:
        self._thread.join(20)


def requests_of(gateway: LiveGateway) -> dict[str, dict[str, Any]]:
    return {each["request"]: each for each in gateway.controller.live_requests.query()}


def test_requests_are_reported_with_their_place_and_decision(
    gateway: LiveGateway, replica: Callable[..., Served]
) -> None:
    """One runs in the only slot, the other waits; both are gone when nobody has looked for a while."""
    served = replica(slots=1, step_ms=20.0)
    gateway.serve(routes("chat", served))
    requests_of(gateway)
    first = Asked(gateway, "first")
    until(lambda: requests_of(gateway).get("first", {}).get("replica") == "chat/0", 10, "it runs")
    second = Asked(gateway, "second")
    until(lambda: "second" in requests_of(gateway), 10, "it waits")
    shown = requests_of(gateway)
    assert shown["first"]["decision"]["slots"] == 1
    assert (shown["second"]["replica"], shown["second"]["decision"]) == ("", None)
    for asked, id in ((second, "second"), (first, "first")):
        assert gateway.controller.live_requests.cancel(id)
        asked.join()
    assert second.status == 403
    assert json.loads(second.lines[0])["error"]["code"] == "request_cancelled"
    assert "request_cancelled" in first.lines[-1] or "request_cancelled" in "".join(first.lines)
    until(lambda: requests_of(gateway)["first"]["ended"] == "request_cancelled", 10, "its end is reported")
    assert not gateway.controller.live_requests.cancel("first")


def test_nothing_is_reported_unless_an_operator_looks(
    fresh_gateway: LiveGateway, replica: Callable[..., Served]
) -> None:
    """A report of a busy gateway stays small."""
    fresh_gateway.serve(routes("chat", replica()))
    fresh_gateway.http.post("/v1/completions", json={**LONG, "max_tokens": 2, "stream": False}).raise_for_status()
    until(lambda: fresh_gateway.controller.total("arrived") == 1, 10, "the request is reported")
    assert all(not report.requests for report in fresh_gateway.controller.reports)


def test_a_report_has_what_was_counted_since_the_start(
    fresh_gateway: LiveGateway, replica: Callable[..., Served]
) -> None:
    """Tokens, times to the first token, and times between tokens, by bucket."""
    fresh_gateway.serve(routes("chat", replica()))
    for _ in range(2):
        body = {**LONG, "max_tokens": 5, "stream": False}
        fresh_gateway.http.post("/v1/completions", json=body).raise_for_status()
    until(lambda: fresh_gateway.controller.total("ended") == 2, 10, "the requests are reported")
    (load,) = fresh_gateway.controller.reports[-1].loads
    assert (load.model, load.tokens, sum(load.first), sum(load.gaps)) == ("chat", 10, 2, 8)
