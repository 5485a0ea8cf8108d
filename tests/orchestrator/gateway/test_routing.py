"""The order of waiting requests, their deadlines and what clients learn of them: the gateway over real sockets."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec.structs
import pytest

from orchestrator.access.keys import Allowance, KeyFile
from orchestrator.gateway.serving import replica_link_pool
from orchestrator.messages.replica_states import ModelState
from tests.fleet import until
from tests.orchestrator.gateways import LiveGateway, routes
from tests.served import Served

Make = Callable[..., Served]


class Asked:
    """A completion that is asked for on a thread, and its answer once it is there."""

    def __init__(self, gateway: LiveGateway, *, headers: dict[str, str] | None = None, **fields: Any) -> None:
        self.response: httpx.Response | None = None
        body = {"model": "m", "prompt": "hello", "max_tokens": 3, **fields}
        self._gateway = gateway
        self._thread = threading.Thread(target=self._ask, args=(body, headers or {}), daemon=True)
        self._thread.start()

    def _ask(self, body: dict[str, Any], headers: dict[str, str]) -> None:
        with contextlib.suppress(httpx.TransportError):  # the gateway may end first
            self.response = httpx.post(f"{self._gateway.url}/v1/completions", json=body, headers=headers, timeout=30)

    def answer(self) -> httpx.Response:
        self._thread.join(30)
        assert self.response is not None, "no answer within 30 s"
        return self.response

    def code(self) -> str:
        code: str = self.answer().json()["error"]["code"]
        return code


@contextlib.contextmanager
def filled(gateway: LiveGateway, served: Served, **fields: Any) -> Iterator[Asked]:
    """The stepped replica's one slot is taken, until the end of the block."""
    request = Asked(gateway, max_tokens=2, **fields)
    until(lambda: served.in_step, 10, "the slot is taken")
    yield request
    served.run_free()
    assert request.answer().status_code == 200


def waiting(gateway: LiveGateway, count: int) -> None:
    until(lambda: gateway.queue("m").waiting == count, 10, f"{count} requests wait")


def order_of(gateway: LiveGateway, served: Served, asks: list[dict[str, Any]]) -> list[str]:
    """The prompts in the order in which their answers begin, when all have waited for one slot."""
    began: list[str] = []
    submit = served.batcher.submit

    def noted(request: Any) -> None:
        began.append(bytes(request.prompt_ids).decode())
        submit(request)

    with filled(gateway, served, prompt="first"):
        requests = []
        for number, ask in enumerate(asks, start=1):
            requests.append(Asked(gateway, **ask))
            waiting(gateway, number)
        served.batcher.submit = noted  # type: ignore[method-assign]
    for sent in requests:
        assert sent.answer().status_code == 200
    return began


def test_an_urgent_request_precedes_earlier_ones(fresh_gateway: LiveGateway, replica: Make) -> None:
    """`priority` as in vLLM: lower goes first, and equal priorities in order of arrival."""
    gateway = fresh_gateway  # whose queue remembers no other priorities
    served = replica(slots=1, stepped=True)
    gateway.serve(routes("m", served))
    asks: list[dict[str, Any]] = [
        {"prompt": "a", "priority": 5},
        {"prompt": "b"},
        {"prompt": "c", "priority": -1},
        {"prompt": "d"},
    ]
    assert order_of(gateway, served, asks) == ["c", "b", "d", "a"]


def test_the_earliest_deadline_goes_first_if_the_spec_selects_it(gateway: LiveGateway, replica: Make) -> None:
    """`queue_order: deadline`; requests without a deadline come last."""
    served = replica(slots=1, stepped=True)
    gateway.serve(msgspec.structs.replace(routes("m", served), queue_order="deadline"))
    asks: list[dict[str, Any]] = [
        {"prompt": "a"},
        {"prompt": "b", "headers": {"x-deadline-ms": "60000"}},
        {"prompt": "c", "headers": {"x-deadline-ms": "50000"}},
    ]
    assert order_of(gateway, served, asks) == ["c", "b", "a"]


def test_a_full_queue_makes_room_for_more_urgent_requests(fresh_gateway: LiveGateway, replica: Make) -> None:
    """A flood of low priority cannot starve others: its last request is rejected instead."""
    gateway = fresh_gateway  # whose queue remembers no other priorities
    served = replica(slots=1, stepped=True)
    gateway.serve(routes("m", served, max_queue=1))
    with filled(gateway, served):
        low = Asked(gateway, priority=3)
        waiting(gateway, 1)
        high = Asked(gateway)
        assert (low.answer().status_code, low.code()) == (429, "queue_full")
        waiting(gateway, 1)
    assert high.answer().status_code == 200


def test_a_deadline_that_cannot_be_kept_is_rejected_at_once(gateway: LiveGateway, replica: Make) -> None:
    """The response has the predicted wait, from measurements, and the time of a retry."""
    served = replica(slots=1, stepped=True)
    gateway.serve(routes("m", served))
    gateway.queue("m").dispatcher.mean_service_s = 20.0
    with filled(gateway, served):
        before = Asked(gateway)
        waiting(gateway, 1)
        refused = Asked(gateway, headers={"x-deadline-ms": "5000"})
        assert (refused.answer().status_code, refused.code()) == (429, "deadline_unreachable")
        assert 25 <= int(refused.answer().headers["retry-after"]) <= 40
        assert "40.0 s" in refused.answer().json()["error"]["message"]
        soon = Asked(gateway, headers={"x-deadline-ms": "5"})
        assert re.search(r"its deadline is in [0-5](\.\d+)? ms\.", soon.answer().json()["error"]["message"])
    assert before.answer().status_code == 200


def test_a_deadline_that_passes_in_the_queue_ends_the_wait(gateway: LiveGateway, replica: Make) -> None:
    """504, and the request takes no slot."""
    served = replica(slots=1, stepped=True)
    gateway.serve(routes("m", served))
    gateway.queue("m").dispatcher.mean_service_s = 0.001
    with filled(gateway, served):
        late = Asked(gateway, headers={"x-deadline-ms": "300"})
        assert (late.answer().status_code, late.code()) == (504, "deadline_exceeded")
        assert gateway.queue("m").waiting == 0


def test_the_spec_limits_every_wait(gateway: LiveGateway, replica: Make) -> None:
    """`max_wait_s` is a deadline for requests without one, and for those with a longer one."""
    served = replica(slots=1, stepped=True)
    gateway.serve(msgspec.structs.replace(routes("m", served), max_wait_s=0.3))
    gateway.queue("m").dispatcher.mean_service_s = 0.001
    with filled(gateway, served):
        late = [Asked(gateway), Asked(gateway, headers={"x-deadline-ms": "60000"})]
        assert [request.code() for request in late] == ["deadline_exceeded"] * 2


@pytest.mark.parametrize("given", ["0", "-3", "soon", "nan", "1e12"])
def test_an_invalid_deadline_is_a_clear_error(gateway: LiveGateway, replica: Make, given: str) -> None:
    gateway.serve(routes("m", replica()))
    refused = Asked(gateway, headers={"x-deadline-ms": given}).answer()
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-deadline-ms")


def test_a_request_waits_for_a_model_at_zero_up_to_the_specs_limit(gateway: LiveGateway) -> None:
    """`scaling.hold_s`: after it the response is 503, as if the model were down, with a retry time."""
    gateway.serve(
        msgspec.structs.replace(routes("m", state=ModelState.LOADING, holds=True), hold_s=0.3),
    )
    held = Asked(gateway)
    assert (held.answer().status_code, held.code()) == (503, "model_loading")
    assert held.answer().headers["retry-after"]
    assert gateway.queue("m").waiting == 0


@pytest.mark.parametrize("reason", [None, "held back: no cores that serve less elsewhere"])
def test_a_request_for_which_nothing_was_started_gets_the_reason(gateway: LiveGateway, reason: str | None) -> None:
    """Since nothing loads, "loading" would be misleading."""
    table = routes("m", state=ModelState.UNLOADED, holds=True, reason=reason)
    gateway.serve(msgspec.structs.replace(table, hold_s=0.3))
    held = Asked(gateway)
    assert (held.answer().status_code, held.code()) == (503, "model_unavailable")
    why = r"no replica was started in \d+ s" + (f", {reason}" if reason else "")
    assert re.fullmatch(rf"The model 'm' is unloaded: {why}\.", held.answer().json()["error"]["message"])


def test_a_sampled_event_has_the_id_that_its_client_knows(fresh_gateway: LiveGateway, replica: Make) -> None:
    """x-request-id, which the log has too; not the replica's number."""
    gateway = fresh_gateway
    gateway.serve(routes("m", replica()))
    body = {"model": "m", "prompt": "x", "max_tokens": 2}
    answer = gateway.http.post("/v1/completions", json=body, headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"

    def names() -> list[str]:
        return [decision.request for report in gateway.controller.reports for decision in report.decisions]

    until(lambda: bool(names()), 10, "a report has a sample")
    assert names() == ["mine-1"]


def test_waiting_requests_are_held_from_the_loss_of_the_last_replica(gateway: LiveGateway, replica: Make) -> None:
    """They wait no longer for the next replica than a request that arrives now."""
    served = replica(slots=1, stepped=True)
    table = msgspec.structs.replace(routes("m", served), hold_s=0.3)
    gateway.serve(table)
    with filled(gateway, served):
        held = Asked(gateway)
        waiting(gateway, 1)
        gateway.controller.set(msgspec.structs.replace(routes("m", state=ModelState.LOADING, holds=True), hold_s=0.3))
        assert (held.answer().status_code, held.code()) == (503, "model_loading")


def test_requests_are_held_while_no_replica_can_be_reached(
    gateway: LiveGateway, replica: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the controller, the routes name lost replicas for as long as it is away."""
    monkeypatch.setattr(replica_link_pool, "UNREACHABLE_S", 0.2)
    served = replica(slots=1, stepped=True)
    gateway.serve(msgspec.structs.replace(routes("m", served), hold_s=0.3))
    taken = Asked(gateway)
    until(lambda: served.in_step, 10, "the slot is taken")
    waited = Asked(gateway)
    waiting(gateway, 1)
    served.kill()
    for held in (taken, waited, Asked(gateway)):
        assert (held.answer().status_code, held.code()) == (503, "model_unavailable")
        assert "none of its replicas can be reached" in held.answer().json()["error"]["message"]
    assert gateway.queue("m").waiting == 0


def test_a_waiting_stream_gets_comments_and_then_its_answer(replica: Make) -> None:
    """Proxies close silent connections; clients of server-sent events skip comments."""
    gateway = LiveGateway(keep_alive_s=0.05)
    try:
        gateway.serve(routes("m", state=ModelState.UNLOADED, holds=True))
        body = {"model": "m", "prompt": "hello", "max_tokens": 3, "stream": True}
        with gateway.http.stream(
            "POST", "/v1/completions", json=body, headers={"x-corewright-explain": "1"}
        ) as response:
            lines = response.iter_lines()
            assert [next(lines) for _ in range(4)] == [": waiting", "", ": waiting", ""]
            gateway.serve(routes("m", replica(), holds=True))
            rest = [line for line in lines if line]
        data = [line.removeprefix("data: ") for line in rest if line.startswith("data: ")]
        assert data[-1] == "[DONE]"
        assert json.loads(data[-2])["choices"][0]["finish_reason"] == "length"
        decisions = [line for line in rest if line.startswith(": x-corewright-decision")]
        assert len(decisions) == 1
        assert "start=cold" in decisions[0]
    finally:
        gateway.close()


def test_an_error_ends_a_stream_that_has_waited() -> None:
    """Its 200 is sent already, so the error is an event."""
    gateway = LiveGateway(keep_alive_s=0.05)
    try:
        gateway.serve(msgspec.structs.replace(routes("m", state=ModelState.LOADING, holds=True), hold_s=0.3))
        body = {"model": "m", "prompt": "hello", "stream": True}
        with gateway.http.stream("POST", "/v1/completions", json=body) as response:
            lines = [line for line in response.iter_lines() if line and not line.startswith(":")]
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "model_loading"
    finally:
        gateway.close()


def test_an_answer_has_its_routing_decision_on_request(gateway: LiveGateway, replica: Make) -> None:
    """The decision record: time in the queue, candidates, slot, cold or warm."""
    gateway.serve(routes("m", replica(slots=2), replica(slots=2)))
    plain = Asked(gateway).answer()
    answer = Asked(gateway, headers={"x-corewright-explain": "1"}).answer()
    assert "x-corewright-decision" not in plain.headers
    decision = dict(pair.split("=") for pair in answer.headers["x-corewright-decision"].split("; "))
    assert decision.keys() == {"queue_ms", "candidates", "replica", "slot", "start", "retries"}
    assert (decision["candidates"], decision["slot"], decision["start"], decision["retries"]) == (
        "2",
        "1/2",
        "warm",
        "0",
    )
    assert decision["replica"] == answer.headers["x-corewright-replica"]
    assert 0 <= float(decision["queue_ms"]) < 1000


@pytest.mark.parametrize("session", [{"headers": {"x-session-id": "s"}}, {"model": "m:support"}])
def test_a_session_stays_with_its_replica_while_that_has_a_slot(
    session: dict[str, Any], gateway: LiveGateway, replica: Make
) -> None:
    """A preference: if its replica is full, the session is served elsewhere rather than waiting. The requests of an
    adapter are one, as its replica has it loaded."""
    first, second = replica(slots=1, stepped=True), replica(slots=1)
    gateway.serve(msgspec.structs.replace(routes("m", first, second), adapters=["support"]))
    with filled(gateway, first):
        assert Asked(gateway, **session).answer().headers["x-corewright-replica"] == "m/1"
    explained = {**session, "headers": {**session.get("headers", {}), "x-corewright-explain": "1"}}
    answers = [Asked(gateway, **explained).answer() for _ in range(3)]
    assert {answer.headers["x-corewright-replica"] for answer in answers} == {"m/1"}
    assert all("affinity=session" in answer.headers["x-corewright-decision"] for answer in answers)


def test_two_keys_share_by_their_weights_while_both_wait(replica: Make) -> None:
    """Tokens 1:3, as counted by the gateway's own metrics."""
    gateway = LiveGateway()
    try:
        keys = KeyFile(gateway.home / "keys.json")
        light = keys.create("light")[1]
        heavy = keys.create("heavy", allowance=Allowance(weight=3.0))[1]
        served = replica(slots=2, stepped=True)
        gateway.serve(routes("m", served))
        until(lambda: len(gateway._server.gateway.gate.keys) == 2, 5, "the keys are known")
        began: list[str] = []
        submit = served.batcher.submit

        def noted(request: Any) -> None:
            began.append(bytes(request.prompt_ids).decode())
            submit(request)

        served.batcher.submit = noted  # type: ignore[method-assign]
        requests = []
        for name, key in (("l", light), ("h", heavy)):
            for _ in range(26):
                headers = {"authorization": f"Bearer {key}"}
                requests.append(Asked(gateway, prompt=name, max_tokens=4, headers=headers))
        waiting(gateway, 50)
        served.run_free()
        for sent in requests:
            assert sent.answer().status_code == 200
        shares = Counter(began[4:28])  # while both wait, and beyond what came before anybody waited
        assert 2.5 <= shares["h"] / shares["l"] <= 3.6
    finally:
        gateway.close()


def test_the_controller_gets_the_demand_of_each_model(fresh_gateway: LiveGateway, replica: Make) -> None:
    """Reports count each request once, with the current waiting and running requests."""
    gateway = fresh_gateway  # which has no requests of other tests to report
    served = replica(slots=1, stepped=True)
    gateway.serve(routes("m", served, max_queue=1))
    with filled(gateway, served, prompt="abcd"):
        other = Asked(gateway)
        waiting(gateway, 1)
        assert Asked(gateway).answer().status_code == 429
        until(lambda: gateway.controller.demand_of("m").waiting == 1, 5, "the report tells of the wait")
        assert gateway.controller.demand_of("m").live == 1
        assert gateway.controller.demand_of("m").longest_wait_s > 0
    assert other.answer().status_code == 200
    until(lambda: gateway.controller.total("ended") == 2, 5, "both ends are told")
    until(lambda: gateway.controller.demand_of("m").live == 0, 5, "nothing runs")
    total = gateway.controller.total
    assert (total("arrived"), total("first_tokens")) == (3, 2)
    assert total("slot_s") > 0
    assert total("prefill_s") > 0
    numbers = [report.number for report in gateway.controller.reports]
    assert numbers == sorted(set(numbers))
    sampled = [decision for report in gateway.controller.reports for decision in report.decisions]
    assert {decision.model for decision in sampled} == {"m"}
    assert {decision.replica for decision in sampled} == {"m/0"}


def test_a_request_that_lost_its_slot_to_another_gateway_keeps_its_deadline(
    gateway: LiveGateway, replica: Make
) -> None:
    """The replica returns BUSY, the request keeps waiting, and its time continues."""
    other = LiveGateway()
    try:
        served = replica(slots=1, stepped=True)
        for each in (gateway, other):
            each.serve(msgspec.structs.replace(routes("m", served), max_wait_s=0.3))
        with filled(other, served):
            late = Asked(gateway)
            assert (late.answer().status_code, late.code()) == (504, "deadline_exceeded")
    finally:
        other.close()


def test_choices_that_wait_when_their_model_changes_are_counted_once(replica: Make) -> None:
    """One rejection takes all choices of a request out of the queue; `close` verifies the counts."""
    gateway = LiveGateway()
    served = replica(slots=1, stepped=True)
    gateway.serve(routes("m", served))
    with filled(gateway, served):
        several = Asked(gateway, n=3)
        waiting(gateway, 3)
        gateway.controller.set(routes("m", served, state=ModelState.FAILED))
        assert several.answer().status_code == 503
    gateway.close()


def test_an_urgent_request_gets_a_reserved_slot_although_the_queue_is_full(replica: Make) -> None:
    """It needs no place in the queue, so no other request is rejected for it."""
    gateway = LiveGateway()
    served = replica(slots=2, stepped=True)
    gateway.serve(routes("m", served, max_queue=1))
    gateway.queue("m").dispatcher.headroom.add(-1, 0.0)
    low = [Asked(gateway, max_tokens=2)]
    until(lambda: gateway.queue("m").links.live == 1, 10, "the first one has a slot")
    gateway.queue("m").dispatcher.headroom.remove(-1, 0.0)
    low.append(Asked(gateway, max_tokens=2))
    waiting(gateway, 1)
    high = Asked(gateway, priority=-1, max_tokens=2)
    until(lambda: gateway.queue("m").links.live == 2, 10, "the urgent one has the kept slot")
    assert gateway.queue("m").waiting == 1
    served.run_free()
    assert [request.answer().status_code for request in (*low, high)] == [200] * 3
    gateway.close()


def keyed(gateway: LiveGateway, *names: str) -> list[tuple[str, dict[str, str]]]:
    """Keys that the gateway knows: the id of each, and the headers of its requests."""
    file = KeyFile(gateway.home / "keys.json")
    keys = [file.create(name) for name in names]
    until(lambda: len(gateway._server.gateway.gate.keys) == len(names), 5, "the keys are known")
    return [(key.id, {"authorization": f"Bearer {secret}"}) for key, secret in keys]


def test_a_tenant_whose_requests_never_wait_earns_no_credit(replica: Make) -> None:
    """Its counter is lifted when it gets a slot at once, as it is when it waits."""
    gateway = LiveGateway()
    try:
        (seldom, rare), (often, much) = keyed(gateway, "seldom", "often")
        gateway.serve(routes("m", replica()))
        for headers, tokens in ((rare, 1), (much, 50), (rare, 1)):
            assert Asked(gateway, headers=headers, max_tokens=tokens).answer().status_code == 200
        line = gateway.queue("m").dispatcher.lines[0]
        assert line.counter(seldom) >= line.counter(often) >= 100
    finally:
        gateway.close()


def test_a_prompt_without_a_slot_is_not_charged(replica: Make) -> None:
    """Another gateway was faster: the request keeps waiting, and its tenant is not charged for the attempt."""
    gateway, other = LiveGateway(), LiveGateway()
    try:
        (first, own), (_, foreign) = keyed(gateway, "first", "second")
        gateway.serve(routes("m", replica()))
        for headers in (foreign, own):  # where one tenant alone has asked, nothing is counted
            assert Asked(gateway, headers=headers).answer().status_code == 200
        served = replica(slots=1, stepped=True)
        for each in (gateway, other):
            each.serve(routes("m", served))
        line = gateway.queue("m").dispatcher.lines[0]
        before = line.counter(first)
        with filled(other, served):
            late = Asked(gateway, headers=own)
            waiting(gateway, 1)
            assert line.counter(first) == before
        assert late.answer().status_code == 200
    finally:
        gateway.close()
        other.close()


def test_slots_reserved_for_urgent_requests_count_in_the_predicted_wait(replica: Make) -> None:
    """A free slot that a request will not get does not shorten its predicted wait."""
    gateway = LiveGateway()
    served = replica(slots=2, stepped=True)
    gateway.serve(routes("m", served))
    gateway.queue("m").dispatcher.mean_service_s = 20.0
    gateway.queue("m").dispatcher.headroom.add(-1, 0.0)
    low = Asked(gateway, max_tokens=2)
    until(lambda: gateway.queue("m").links.live == 1, 10, "the first one has a slot")
    gateway.queue("m").dispatcher.headroom.remove(-1, 0.0)
    refused = Asked(gateway, headers={"x-deadline-ms": "5000"})
    assert (refused.answer().status_code, refused.code()) == (429, "deadline_unreachable")
    served.run_free()
    assert low.answer().status_code == 200
    gateway.close()


def test_a_deadline_is_not_rejected_behind_an_almost_complete_answer(gateway: LiveGateway, replica: Make) -> None:
    """By the tokens that it may still get and the pace of its replica, regardless of the mean of requests."""
    served = replica(slots=1, stepped=True)
    gateway.serve(routes("m", served))
    queue = gateway.queue("m")
    queue.dispatcher.mean_service_s = 60.0
    for link in queue.links:
        link._pace.value = 0.01
    with filled(gateway, served):
        waits = Asked(gateway, headers={"x-deadline-ms": "20000"})
        waiting(gateway, 1)
    assert waits.answer().status_code == 200
