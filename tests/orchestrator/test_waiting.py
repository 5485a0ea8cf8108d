"""Who is next of those that wait for a slot."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from orchestrator.dispatch.fair_queue import FairQueue, Order, QueueFull
from orchestrator.dispatch.queue_orders import RECENT, REMEMBERED


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
    made: FairQueue[Item] = FairQueue(count, size, order=order)  # type: ignore[type-var]
    for item in items:
        made.push(item)
    return made


def names(made: FairQueue[Item]) -> str:  # type: ignore[type-var]
    """Of all, in their order."""
    return "".join(item.name for item in made.clear())


def test_requests_of_one_tenant_are_first_come_first_served() -> None:
    """Without keys and priorities the whole line is."""
    assert names(line(*(Item(name, arrived_at=float(at)) for at, name in enumerate("abcdef")))) == "abcdef"


def test_a_lower_priority_goes_first() -> None:
    """As in vLLM: the lower number, for any order of arrival and any usage of its tenant."""
    made = line(Item("a"), Item("b", priority=3), Item("c", "x", priority=-1), Item("d"))
    made.charge("x", 1000, priority=-1)
    assert names(made) == "cadb"


def test_the_tenant_with_the_least_tokens_is_next() -> None:
    """A prompt's token is charged once, an answer's twice, over the weight."""
    made = line(Item("a", "a"), Item("b", "b"), Item("c", "c"))
    made.set_weight("c", 4.0)
    made.charge("a", prompt_tokens=100)
    made.charge("b", output_tokens=49)
    made.charge("c", prompt_tokens=100, output_tokens=100)
    assert (made.counter("a"), made.counter("b"), made.counter("c")) == (100, 98, 75)
    assert names(made) == "cba"


def test_with_equal_counters_arrival_decides() -> None:
    """Also when the first request of a tenant has left meanwhile."""
    gone = Item("a", "a", arrived_at=1.0)
    made = line(gone, Item("b", "b", arrived_at=2.0), Item("c", "a", arrived_at=3.0), Item("d", "d", arrived_at=4.0))
    assert made.remove(gone)
    assert names(made) == "bcd"


def test_weights_share_the_tokens() -> None:
    """Of two tenants that always wait, the one with three times the weight gets three times the requests."""
    made = line()
    made.set_weight("big", 3.0)
    served = {"big": 0, "small": 0}
    for tenant in ("big", "small", "big", "small"):  # two: who pops its last one does not wait any more
        made.push(Item(tenant, tenant))
    for _ in range(400):
        item = made.pop()
        served[item.tenant] += 1
        made.charge(item.tenant, 50, 50)
        made.push(Item(item.tenant, item.tenant))
    assert served["big"] == pytest.approx(300, abs=2)


def test_a_tenant_that_was_away_is_lifted_to_those_that_wait() -> None:
    """It has saved nothing up: it and the other take turns from now on."""
    made = line(Item("a", "a"), Item("a", "a"), Item("a", "a"))
    made.charge("a", 1000)
    for name in "bbb":
        made.push(Item(name, "b"))
    order = ""
    while made:
        order += made.pop().name
        made.charge(order[-1], 10)
    assert order == "ababab"


def test_a_tenant_that_never_waits_earns_no_credit() -> None:
    """Requests that get a slot at once count as much for the lift as those that wait."""
    made = line()
    for _ in range(10):
        made.pass_by(Item("a", "a"))
        made.charge("a", 100)
    made.push(Item("b", "b"))  # the first to wait, and it had no token yet
    made.push(Item("a", "a"))
    assert made.counter("b") == made.counter("a") == 1000


def test_each_priority_has_separate_counters() -> None:
    """Usage with one priority is not a debt with another."""
    made = line(Item("a", "a", arrived_at=1.0), Item("b", "b", arrived_at=2.0))
    made.charge("a", 1000, priority=-5)
    assert names(made) == "ab"


def test_returned_requests_go_first() -> None:
    """Before all others of their tenant and priority, and in their old order if several return; the bounds do not
    apply, and the charge can be reverted.
    """
    made = line(*(Item(name, "a") for name in "abc"), count=3)
    first, second = made.pop(), made.pop()
    made.charge("a", 20)
    made.push(Item("d", "a"))
    made.push(Item("e", "b"))
    for item in (second, first):
        made.put_back(item)
    made.charge("a", -20)
    assert made.counter("a") == 0
    assert len(made) == 5
    assert names(made) == "abcde"


def test_reverted_charges_restore_the_turn() -> None:
    """A tenant whose charge was wrong is next again, although another had overtaken it."""
    made = line(Item("a", "a"), Item("b", "b"))
    made.charge("a", 50)
    assert [item.name for item in made if item is made.peek()] == ["b"]
    made.charge("a", -50)
    made.charge("b", 1)
    assert names(made) == "ab"


def test_a_line_is_bounded_in_count() -> None:
    """One more than fits is refused with the numbers, and nothing changes."""
    made = line(Item("a"), Item("b"), count=2)
    refusal = made.refusal(Item("c"))
    assert refusal == QueueFull("count", used=2, needed=1, limit=2)
    assert str(refusal) == "2 requests are waiting; 1 more would exceed the limit of 2"
    assert names(made) == "ab"


def test_a_line_is_bounded_in_bytes() -> None:
    """One that is too large is refused with the numbers; a smaller one may still come."""
    made = line(Item("a", size=60), size=100)
    assert str(made.refusal(Item("b", size=41))) == (
        "60 bytes of requests are waiting; 41 more would exceed the limit of 100"
    )
    assert made.refusal(Item("c", size=40)) is None
    made.push(Item("c", size=40))
    assert made.bytes == 100
    assert names(made) == "ac"
    assert made.bytes == 0


def test_bounds_may_change_while_requests_wait() -> None:
    """Waiting requests stay; the next one is subject to the new bound."""
    made = line(Item("a"), Item("b"), count=2)
    made.max_count = 1
    assert made.refusal(Item("c")) == QueueFull("count", used=2, needed=1, limit=1)
    made.max_count = 3
    assert made.refusal(Item("d")) is None
    made.push(Item("d"))
    assert names(made) == "abd"


def test_a_removed_request_is_not_served() -> None:
    """It frees its place and its bytes; a second removal does nothing."""
    leaving = Item("b", size=7)
    made = line(Item("a"), leaving, Item("c"))
    assert made.remove(leaving)
    assert not made.remove(leaving)
    assert not made.remove(Item("never there", priority=9))
    assert (len(made), made.bytes) == (2, 2)
    assert names(made) == "ac"


def test_a_less_urgent_request_is_displaced_in_a_full_line() -> None:
    """A flood of low priority does not keep a high one out: its last request leaves."""
    made = line(*(Item(name, priority=5) for name in "abc"), count=3)
    assert [item.name for item in made.make_room(Item("d"))] == ["c"]
    made.push(Item("d"))
    assert made.make_room(Item("e", priority=5)) == []
    assert names(made) == "dab"


def test_the_tenant_with_the_most_requests_is_displaced_in_a_full_line() -> None:
    """Until the other has as many for its weight; no tenant displaces itself."""
    made = line(*(Item(name, "flood") for name in "abcd"), count=4)
    made.set_weight("flood", 3.0)
    assert [item.name for item in made.make_room(Item("e", "other"))] == ["d"]
    made.push(Item("e", "other"))
    assert made.make_room(Item("f", "other")) == []
    assert made.make_room(Item("g", "flood")) == []
    assert len(made) == 4


def test_no_request_leaves_for_one_that_is_too_large_anyhow() -> None:
    """All candidates keep their places."""
    made = line(Item("a", priority=1), Item("b", size=30), Item("c", priority=1), size=40)
    assert made.make_room(Item("d", size=20)) == []
    assert made.bytes == 32
    assert names(made) == "bac"


def test_only_as_many_requests_leave_as_needed() -> None:
    """For its bytes several small ones may have to."""
    made = line(*(Item(name, priority=1, size=10) for name in "abcd"), size=40)
    assert [item.name for item in made.make_room(Item("e", size=15))] == ["d", "c"]


def test_the_earliest_deadline_is_next() -> None:
    """Within a priority; those without a deadline come last, in the order of their arrival."""
    made = line(
        Item("a", arrived_at=1.0),
        Item("b", arrived_at=2.0, deadline=50.0),
        Item("c", arrived_at=3.0, deadline=20.0),
        Item("d", arrived_at=4.0, deadline=20.0),
        Item("e", arrived_at=5.0),
        Item("f", arrived_at=6.0, priority=-1),
        order="deadline",
    )
    assert names(made) == "fcdbae"


def test_the_requests_ahead_are_those_that_go_first() -> None:
    """All of lower priorities, its own earlier ones, and of another tenant those that its counter allows."""
    mine = Item("c", "mine")
    made = line(Item("a", "mine", priority=-1), Item("b", "mine"), mine, Item("d", "mine"), Item("e", priority=7))
    assert made.ahead_of(mine) == 2
    for name in "fghij":
        made.push(Item(name, "other"))
    made.charge("other", 30)
    made.charge("mine", 20)
    made.pop()
    assert made.ahead_of(mine) < made.ahead_of(Item("k", "mine")) < made.ahead_of(Item("l", "other"))
    assert made.ahead_of(Item("m", priority=9)) == len(made)


def test_tenants_that_alternate_are_counted_accordingly() -> None:
    """With a mean charge of 10, a request with two before it lets three pass of an equal tenant that waits already;
    of one with 10 more, two, and of one with twice the weight, all five.
    """
    made = line()
    for _ in range(4):
        made.push(Item("x", "x"))
        made.pop()
        made.pass_by(Item("y", "x"))
        made.charge("x", 20)
    for name, tenant in (*(("m", "mine"),) * 2, *(("o", "other"),) * 5):
        made.push(Item(name, tenant))
    assert made.counter("mine") == made.counter("other") == 80
    newcomer = Item("n", "mine")
    assert made.ahead_of(newcomer) == 2 + 3
    made.charge("other", 10)
    assert made.ahead_of(newcomer) == 2 + 2
    made.charge("other", -10)
    made.set_weight("other", 2.0)
    assert made.ahead_of(newcomer) == 2 + 5


def test_a_tenants_wait_follows_the_recent_pace_of_its_requests() -> None:
    """Against three times its weight every fourth slot is its own."""
    made = line(*(Item(name, tenant) for _ in range(6) for name, tenant in (("m", "mine"), ("o", "other"))))
    made.set_weight("other", 3.0)
    waits = []
    for second in range(80):
        item = made.pop()
        made.charge(item.tenant, 10)
        made.push(Item(item.name, item.tenant, arrived_at=float(second)))
        waits.append(made.own_wait_s(Item("q", "mine"), float(second)))
    assert waits[0] == 0.0
    assert waits[-1] == pytest.approx(7 * 4.0, rel=0.25)
    for item in [item for item in made if item.tenant == "mine"]:
        made.remove(item)
    made.push(Item("m", "mine"))
    assert made.own_wait_s(Item("q", "mine"), 81.0) == 0.0  # a new spell: what was before says nothing


def test_a_single_tenant_waits_only_for_the_requests_before_it() -> None:
    """A line without keys has no paces."""
    made = line(*(Item("a") for _ in range(30)))
    for second in range(20):
        made.pop()
        assert made.own_wait_s(Item("q"), float(second)) == 0.0


def test_a_request_returned_late_has_no_credit() -> None:
    """A retry after a long time: its tenant is as far as those that were served meanwhile."""
    made = line(Item("a", "a"), *(Item("b", "b") for _ in range(5)))
    retried = made.pop()
    for _ in range(3):
        made.charge(made.pop().tenant, 100)
    made.put_back(retried)
    assert made.counter("a") == 200  # the third of the others was next at that
    assert names(made) == "abb"


def test_after_an_idle_time_the_last_counter_applies() -> None:
    """In an empty line, a newcomer is lifted to the tenant that waited last."""
    made = line(Item("a", "a"))
    made.pop()
    made.charge("a", 500)
    made.push(Item("b", "b"))
    assert made.counter("b") == 500


def test_ahead_by_deadline_are_earlier_deadlines() -> None:
    due = [Item(str(at), deadline=float(at)) for at in (10, 30, 20)]
    made = line(*due, order="deadline")
    assert [made.ahead_of(item) for item in due] == [0, 2, 1]
    assert made.ahead_of(Item("x", deadline=15.0)) == 1
    assert made.ahead_of(Item("y")) == 3


def test_tenants_are_those_with_waiting_requests() -> None:
    made = line(Item("a", "a"), Item("b", "a"), Item("c", "c"))
    assert made.tenants == 2
    made.clear()
    assert made.tenants == 0


def test_an_empty_line_has_no_next_request() -> None:
    made = line()
    assert made.peek() is None
    assert not made
    with pytest.raises(IndexError, match="the queue is empty"):
        made.pop()


def test_clients_cannot_fill_the_memory_with_priorities_and_tenants() -> None:
    """Counters of those that are not here any more are forgotten where that changes nothing, and at some number."""
    made = line()
    for number in range(3 * REMEMBERED):
        made.push(Item("a", priority=number))
        made.pop()
    assert len(made._classes) <= REMEMBERED
    for number in range(3 * REMEMBERED):
        made.push(Item("a", f"tenant {number}"))
        made.charge(made.pop().tenant, 1)
    fair = made._classes[0]
    assert len(fair._lanes) <= REMEMBERED + 1  # type: ignore[union-attr]


@pytest.mark.parametrize(("order", "kept"), [("fair", "_heap"), ("deadline", "_due")])
def test_removed_requests_leave_nothing_behind(order: Order, kept: str) -> None:
    """What is kept does not grow with requests that arrived and left."""
    made = line(Item("stays", "s", deadline=1.0), order=order)
    for number in range(2000):
        item = Item("goes", f"t{number % 50}", deadline=2.0)
        made.push(item)
        assert made.remove(item)
    assert len(getattr(made._classes[0], kept)) < 150


def test_a_request_with_a_slot_at_once_after_a_pause_earns_no_credit() -> None:
    """Its counter is lifted as by waiting, to the tenant with the last request here."""
    made = line()
    made.pass_by(Item("a", "a"))
    made.charge("a", 1000)
    made.pass_by(Item("b", "b"))
    assert made.counter("b") == 1000


def test_after_all_have_left_the_last_counter_applies() -> None:
    """A newcomer is lifted to the tenant that waited last, also if its client disconnected."""
    gone = Item("a", "a")
    made = line(gone)
    made.charge("a", 500)
    assert made.remove(gone)
    made.push(Item("b", "b"))
    assert made.counter("b") == 500


def test_displacement_considers_weights() -> None:
    """Three requests of a tenant of weight 3 are less than two of one of weight 1."""
    made = line(*(Item(name, "big") for name in "abc"), Item("d", "small"), Item("e", "small"), count=5)
    made.set_weight("big", 3.0)
    assert [item.name for item in made.make_room(Item("f", "new"))] == ["e"]


def test_no_request_is_displaced_for_a_tenant_that_would_then_have_as_many() -> None:
    """Two tenants do not displace each other's requests in turn."""
    made = line(Item("a", "a"), Item("b", "a"), Item("c", "b"), count=3)
    assert made.make_room(Item("d", "b")) == []


def test_among_less_urgent_tenants_the_last_arrival_is_displaced() -> None:
    """Longer waiting requests keep their places."""
    made = line(Item("a", "a", 5, arrived_at=1.0), Item("b", "b", 5, arrived_at=2.0), count=2)
    assert [item.name for item in made.make_room(Item("c", arrived_at=3.0))] == ["b"]


def test_no_request_is_displaced_for_one_that_just_fits() -> None:
    """The bounds are inclusive."""
    made = line(Item("a", priority=1, size=30), size=40)
    last = Item("b", size=10)
    assert made.refusal(last) is None
    assert made.make_room(last) == []
    made.push(last)
    assert made.bytes == 40


def test_a_debt_is_kept_for_any_number_of_tenants() -> None:
    """A tenant with more usage than the waiting ones is not forgotten, which would reset it."""
    made = line(Item("waits", "w"))
    made.charge("debtor", 1000)
    for number in range(REMEMBERED + 10):
        passing = Item("x", f"tenant {number}")
        made.push(passing)
        assert made.remove(passing)
    assert made.counter("debtor") == 1000


def test_the_mean_charge_follows_the_last_requests() -> None:
    """After 3000 requests of a charge of 10 each, a tenant with 15 more than the other lets one of its five pass."""
    made = line()
    for _ in range(3 * RECENT):
        made.push(Item("x", "x"))
        made.pop()
        made.charge("x", 10)
    for name, tenant in (*(("m", "mine"),) * 2, *(("o", "other"),) * 5):
        made.push(Item(name, tenant))
    made.charge("other", 15)
    assert made.ahead_of(Item("n", "mine")) == 2 + 1
