"""Who is next of those that wait for a slot; tests/properties/test_waiting.py has what holds for every queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from orchestrator.dispatch.fair_queue import RECENT, REMEMBERED, FairQueue, Order, QueueFull


@dataclass(frozen=True, eq=False)
class Item:
    """Something that waits."""

    name: str
    tenant: str = ""
    priority: int = 0
    arrived_at: float = 0.0
    deadline: float | None = None
    size: int = 1
    tokens: int = 1


def line(*items: Item, order: Order = "fair", count: int = 100, size: int = 1000) -> FairQueue[Item]:  # type: ignore[type-var]
    queue: FairQueue[Item] = FairQueue(count, size, order=order)  # type: ignore[type-var]
    for item in items:
        queue.push(item)
    return queue


def names(queue: FairQueue[Item]) -> str:  # type: ignore[type-var]
    """Of all, in their order."""
    return "".join(item.name for item in queue.clear())


def test_the_tenant_with_the_least_tokens_is_next() -> None:
    """A prompt's token is charged once, an answer's twice, over the weight."""
    queue = line(Item("a", "a"), Item("b", "b"), Item("c", "c"))
    queue.set_weight("c", 4.0)
    queue.charge("a", prompt_tokens=100)
    queue.charge("b", output_tokens=49)
    queue.charge("c", prompt_tokens=100, output_tokens=100)
    assert (queue.counter("a"), queue.counter("b"), queue.counter("c")) == (100, 98, 75)
    assert names(queue) == "cba"


def test_with_equal_counters_arrival_decides() -> None:
    """Also when the first request of a tenant has left meanwhile."""
    gone = Item("a", "a", arrived_at=1.0)
    queue = line(gone, Item("b", "b", arrived_at=2.0), Item("c", "a", arrived_at=3.0), Item("d", "d", arrived_at=4.0))
    assert queue.remove(gone)
    assert names(queue) == "bcd"


def test_weights_share_the_tokens() -> None:
    """Of two tenants that always wait, the one with three times the weight gets three times the requests."""
    queue = line()
    queue.set_weight("big", 3.0)
    served = {"big": 0, "small": 0}
    for tenant in ("big", "small", "big", "small"):  # two: who pops its last one does not wait any more
        queue.push(Item(tenant, tenant))
    for _ in range(400):
        item = queue.pop()
        served[item.tenant] += 1
        queue.charge(item.tenant, 50, 50)
        queue.push(Item(item.tenant, item.tenant))
    assert served["big"] == pytest.approx(300, abs=2)


def test_a_tenant_that_was_away_is_lifted_to_those_that_wait() -> None:
    """It has saved nothing up: it and the other take turns from now on."""
    queue = line(Item("a", "a"), Item("a", "a"), Item("a", "a"))
    queue.charge("a", 1000)
    for name in "bbb":
        queue.push(Item(name, "b"))
    order = ""
    while queue:
        order += queue.pop().name
        queue.charge(order[-1], 10)
    assert order == "ababab"


def test_a_tenant_that_never_waits_earns_no_credit() -> None:
    """Requests that get a slot at once count as much for the lift as those that wait."""
    queue = line()
    for _ in range(10):
        queue.pass_by(Item("a", "a"))
        queue.charge("a", 100)
    queue.push(Item("b", "b"))  # the first to wait, and it had no token yet
    queue.push(Item("a", "a"))
    assert queue.counter("b") == queue.counter("a") == 1000


def test_each_priority_has_separate_counters() -> None:
    """Usage with one priority is not a debt with another."""
    queue = line(Item("a", "a", arrived_at=1.0), Item("b", "b", arrived_at=2.0))
    queue.charge("a", 1000, priority=-5)
    assert names(queue) == "ab"


def test_returned_requests_go_first() -> None:
    """Before all others of their tenant and priority, and in their old order if several return; the bounds do not
    apply, and the charge can be reverted.
    """
    queue = line(*(Item(name, "a") for name in "abc"), count=3)
    first, second = queue.pop(), queue.pop()
    queue.charge("a", 20)
    queue.push(Item("d", "a"))
    queue.push(Item("e", "b"))
    for item in (second, first):
        queue.put_back(item)
    queue.charge("a", -20)
    assert queue.counter("a") == 0
    assert len(queue) == 5
    assert names(queue) == "abcde"


def test_reverted_charges_restore_the_turn() -> None:
    """A tenant whose charge was wrong is next again, although another had overtaken it."""
    queue = line(Item("a", "a"), Item("b", "b"))
    queue.charge("a", 50)
    assert [item.name for item in queue if item is queue.peek()] == ["b"]
    queue.charge("a", -50)
    queue.charge("b", 1)
    assert names(queue) == "ab"


@pytest.mark.parametrize(
    ("limits", "size", "message"),
    [
        ({"count": 2}, 1, "2 requests are waiting; 1 more would exceed the limit of 2"),
        ({"size": 100}, 41, "60 bytes of requests are waiting; 41 more would exceed the limit of 100"),
        ({"size": 100}, 40, "None"),
    ],
)
def test_a_refusal_names_the_bound_with_its_numbers(limits: dict[str, Any], size: int, message: str) -> None:
    queue = line(Item("a", size=30), Item("b", size=30), **limits)
    assert str(queue.refusal(Item("c", size=size))) == message


def test_bounds_may_change_while_requests_wait() -> None:
    """Waiting requests stay; the next one is subject to the new bound."""
    queue = line(Item("a"), Item("b"), count=2)
    queue.max_count = 1
    assert queue.refusal(Item("c")) == QueueFull("count", used=2, needed=1, limit=1)
    queue.max_count = 3
    assert queue.refusal(Item("d")) is None
    queue.push(Item("d"))
    assert names(queue) == "abd"


def test_a_less_urgent_request_is_displaced_in_a_full_line() -> None:
    """A flood of low priority does not keep a high one out: its last request leaves."""
    queue = line(*(Item(name, priority=5) for name in "abc"), count=3)
    assert [item.name for item in queue.make_room(Item("d"))] == ["c"]
    queue.push(Item("d"))
    assert queue.make_room(Item("e", priority=5)) == []
    assert names(queue) == "dab"


def test_the_tenant_with_the_most_requests_is_displaced_in_a_full_line() -> None:
    """Until the other has as many for its weight; no tenant displaces itself."""
    queue = line(*(Item(name, "flood") for name in "abcd"), count=4)
    queue.set_weight("flood", 3.0)
    assert [item.name for item in queue.make_room(Item("e", "other"))] == ["d"]
    queue.push(Item("e", "other"))
    assert queue.make_room(Item("f", "other")) == []
    assert queue.make_room(Item("g", "flood")) == []
    assert len(queue) == 4


def test_no_request_leaves_for_one_that_is_too_large_anyhow() -> None:
    """All candidates keep their places."""
    queue = line(Item("a", priority=1), Item("b", size=30), Item("c", priority=1), size=40)
    assert queue.make_room(Item("d", size=20)) == []
    assert queue.bytes == 32
    assert names(queue) == "bac"


def test_only_as_many_requests_leave_as_needed() -> None:
    """For its bytes several small ones may have to."""
    queue = line(*(Item(name, priority=1, size=10) for name in "abcd"), size=40)
    assert [item.name for item in queue.make_room(Item("e", size=15))] == ["d", "c"]


def test_the_requests_ahead_are_those_that_go_first() -> None:
    """All of lower priorities, its own earlier ones, and of another tenant those that its counter allows."""
    mine = Item("c", "mine")
    queue = line(Item("a", "mine", priority=-1), Item("b", "mine"), mine, Item("d", "mine"), Item("e", priority=7))
    assert queue.ahead_of(mine) == 2
    for name in "fghij":
        queue.push(Item(name, "other"))
    queue.charge("other", 30)
    queue.charge("mine", 20)
    queue.pop()
    assert queue.ahead_of(mine) < queue.ahead_of(Item("k", "mine")) < queue.ahead_of(Item("l", "other"))
    assert queue.ahead_of(Item("m", priority=9)) == len(queue)


def test_tenants_that_alternate_are_counted_accordingly() -> None:
    """With a mean charge of 10, a request with two before it lets three pass of an equal tenant that waits already;
    of one with 10 more, two, and of one with twice the weight, all five.
    """
    queue = line()
    for _ in range(4):
        queue.push(Item("x", "x"))
        queue.pop()
        queue.pass_by(Item("y", "x"))
        queue.charge("x", 20)
    for name, tenant in (*(("m", "mine"),) * 2, *(("o", "other"),) * 5):
        queue.push(Item(name, tenant))
    assert queue.counter("mine") == queue.counter("other") == 80
    newcomer = Item("n", "mine")
    assert queue.ahead_of(newcomer) == 2 + 3
    queue.charge("other", 10)
    assert queue.ahead_of(newcomer) == 2 + 2
    queue.charge("other", -10)
    queue.set_weight("other", 2.0)
    assert queue.ahead_of(newcomer) == 2 + 5


def test_a_tenants_wait_follows_the_recent_pace_of_its_requests() -> None:
    """Against three times its weight every fourth slot is its own."""
    queue = line(*(Item(name, tenant) for _ in range(6) for name, tenant in (("m", "mine"), ("o", "other"))))
    queue.set_weight("other", 3.0)
    waits = []
    for second in range(80):
        item = queue.pop()
        queue.charge(item.tenant, 10)
        queue.push(Item(item.name, item.tenant, arrived_at=float(second)))
        waits.append(queue.own_wait_s(Item("q", "mine"), float(second)))
    assert waits[0] == 0.0
    assert waits[-1] == pytest.approx(7 * 4.0, rel=0.25)
    for item in [item for item in queue if item.tenant == "mine"]:
        queue.remove(item)
    queue.push(Item("m", "mine"))
    assert queue.own_wait_s(Item("q", "mine"), 81.0) == 0.0  # a new spell: what was before says nothing


def test_a_single_tenant_waits_only_for_the_requests_before_it() -> None:
    """A line without keys has no paces."""
    queue = line(*(Item("a") for _ in range(30)))
    for second in range(20):
        queue.pop()
        assert queue.own_wait_s(Item("q"), float(second)) == 0.0


def test_a_request_returned_late_has_no_credit() -> None:
    """A retry after a long time: its tenant is as far as those that were served meanwhile."""
    queue = line(Item("a", "a"), *(Item("b", "b") for _ in range(5)))
    retried = queue.pop()
    for _ in range(3):
        queue.charge(queue.pop().tenant, 100)
    queue.put_back(retried)
    assert queue.counter("a") == 200  # the third of the others was next at that
    assert names(queue) == "abb"


def test_after_an_idle_time_the_last_counter_applies() -> None:
    """In an empty line, a newcomer is lifted to the tenant that waited last."""
    queue = line(Item("a", "a"))
    queue.pop()
    queue.charge("a", 500)
    queue.push(Item("b", "b"))
    assert queue.counter("b") == 500


def test_ahead_by_deadline_are_earlier_deadlines() -> None:
    due = [Item(str(at), deadline=float(at)) for at in (10, 30, 20)]
    queue = line(*due, order="deadline")
    assert [queue.ahead_of(item) for item in due] == [0, 2, 1]
    assert queue.ahead_of(Item("x", deadline=15.0)) == 1
    assert queue.ahead_of(Item("y")) == 3


def test_tenants_are_those_with_waiting_requests() -> None:
    queue = line(Item("a", "a"), Item("b", "a"), Item("c", "c"))
    assert queue.tenants == 2
    queue.clear()
    assert queue.tenants == 0


def test_an_empty_line_has_no_next_request() -> None:
    queue = line()
    assert queue.peek() is None
    assert not queue
    with pytest.raises(IndexError, match="the queue is empty"):
        queue.pop()


def test_clients_cannot_fill_the_memory_with_priorities_and_tenants() -> None:
    """Counters of those that are not here any more are forgotten where that changes nothing, and at some number."""
    queue = line()
    for number in range(3 * REMEMBERED):
        queue.push(Item("a", priority=number))
        queue.pop()
    assert len(queue._classes) <= REMEMBERED
    for number in range(3 * REMEMBERED):
        queue.push(Item("a", f"tenant {number}"))
        queue.charge(queue.pop().tenant, 1)
    fair = queue._classes[0]
    assert len(fair._lanes) <= REMEMBERED + 1  # type: ignore[union-attr]


@pytest.mark.parametrize(("order", "kept"), [("fair", "_heap"), ("deadline", "_waiting")])
def test_removed_requests_leave_nothing_behind(order: Order, kept: str) -> None:
    """What is kept does not grow with requests that arrived and left."""
    queue = line(Item("stays", "s", deadline=1.0), order=order)
    for number in range(2000):
        item = Item("goes", f"t{number % 50}", deadline=2.0)
        queue.push(item)
        assert queue.remove(item)
    assert len(getattr(queue._classes[0], kept)) < 150


def test_a_request_with_a_slot_at_once_after_a_pause_earns_no_credit() -> None:
    """Its counter is lifted as by waiting, to the tenant with the last request here."""
    queue = line()
    queue.pass_by(Item("a", "a"))
    queue.charge("a", 1000)
    queue.pass_by(Item("b", "b"))
    assert queue.counter("b") == 1000


def test_after_all_have_left_the_last_counter_applies() -> None:
    """A newcomer is lifted to the tenant that waited last, also if its client disconnected."""
    gone = Item("a", "a")
    queue = line(gone)
    queue.charge("a", 500)
    assert queue.remove(gone)
    queue.push(Item("b", "b"))
    assert queue.counter("b") == 500


def test_displacement_considers_weights() -> None:
    """Three requests of a tenant of weight 3 are less than two of one of weight 1."""
    queue = line(*(Item(name, "big") for name in "abc"), Item("d", "small"), Item("e", "small"), count=5)
    queue.set_weight("big", 3.0)
    assert [item.name for item in queue.make_room(Item("f", "new"))] == ["e"]


def test_no_request_is_displaced_for_a_tenant_that_would_then_have_as_many() -> None:
    """Two tenants do not displace each other's requests in turn."""
    queue = line(Item("a", "a"), Item("b", "a"), Item("c", "b"), count=3)
    assert queue.make_room(Item("d", "b")) == []


def test_among_less_urgent_tenants_the_last_arrival_is_displaced() -> None:
    """Longer waiting requests keep their places."""
    queue = line(Item("a", "a", 5, arrived_at=1.0), Item("b", "b", 5, arrived_at=2.0), count=2)
    assert [item.name for item in queue.make_room(Item("c", arrived_at=3.0))] == ["b"]


def test_no_request_is_displaced_for_one_that_just_fits() -> None:
    """The bounds are inclusive."""
    queue = line(Item("a", priority=1, size=30), size=40)
    last = Item("b", size=10)
    assert queue.refusal(last) is None
    assert queue.make_room(last) == []
    queue.push(last)
    assert queue.bytes == 40


def test_a_debt_is_kept_for_any_number_of_tenants() -> None:
    """A tenant with more usage than the waiting ones is not forgotten, which would reset it."""
    queue = line(Item("waits", "w"))
    queue.charge("debtor", 1000)
    for number in range(REMEMBERED + 10):
        passing = Item("x", f"tenant {number}")
        queue.push(passing)
        assert queue.remove(passing)
    assert queue.counter("debtor") == 1000


def test_the_mean_charge_follows_the_last_requests() -> None:
    """After 3000 requests of a charge of 10 each, a tenant with 15 more than the other lets one of its five pass."""
    queue = line()
    for _ in range(3 * RECENT):
        queue.push(Item("x", "x"))
        queue.pop()
        queue.charge("x", 10)
    for name, tenant in (*(("m", "mine"),) * 2, *(("o", "other"),) * 5):
        queue.push(Item(name, tenant))
    queue.charge("other", 15)
    assert queue.ahead_of(Item("n", "mine")) == 2 + 1
