"""The dispatcher decides which request gets which slot, which ones wait, and which are refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.dispatch.dispatcher import (
    Dispatcher,
    Entry,
    Expired,
    Full,
    NotStarted,
    QueueSettings,
    Refusal,
    Unreachable,
)
from orchestrator.dispatch.replica_choice import PrefixIndex
from tests.searches import search


@dataclass(eq=False)
class PlayedLink:
    """A link whose requests have as many tokens as the test sets."""

    id: str
    slots: int
    prefixes: PrefixIndex | None = None
    produced: dict[Entry, int] = field(default_factory=dict)
    prefilling: int = 0
    pace: float = 0.0
    stepped_at: float = 0.0

    @property
    def live(self) -> int:
        return len(self.produced)

    @property
    def free_slots(self) -> int:
        return self.slots - len(self.produced)

    @property
    def progress(self) -> list[tuple[Entry, int]]:
        return list(self.produced.items())

    @property
    def bounds(self) -> list[float]:
        return [math.inf] * self.live


class Played:
    """A dispatcher, its links, and a record of its effects."""

    def __init__(self, *slots: int, **chosen: Any) -> None:
        self.links = [PlayedLink(str(i), count) for i, count in enumerate(slots)]
        self.prefix_block = 0
        self.sent: list[tuple[Entry, str]] = []
        self.timers: dict[Entry, float | None] = {}
        self.refused: list[tuple[Entry, Refusal]] = []
        self.busy: set[str] = set()  # replicas without a slot, which the gateway does not know
        self.dispatcher: Dispatcher[Entry, PlayedLink] = Dispatcher(
            QueueSettings(**{"hold_s": 60.0} | chosen), self, self
        )

    def __iter__(self) -> Iterator[PlayedLink]:
        return iter(self.links)

    @property
    def slots(self) -> int:
        return sum(link.slots for link in self.links)

    @property
    def reachable(self) -> bool:
        return bool(self.links)

    def send(self, entry: Entry, link: PlayedLink) -> bool:
        if link.id in self.busy:
            link.slots = link.live
            return False
        link.produced[entry] = 0
        self.sent.append((entry, link.id))
        self.timers.pop(entry, None)
        return True

    def wait(self, entry: Entry, delay_s: float | None) -> None:
        self.timers[entry] = delay_s

    def refuse(self, entry: Entry, refusal: Refusal) -> None:
        self.refused.append((entry, refusal))

    def arrive(self, now: float = 0.0, weight: float = 1.0, **terms: Any) -> tuple[Entry, Refusal | None]:
        given: dict[str, Any] = {"tenant": "", "priority": 0, "deadline": None, "size": 1, "tokens": 1} | terms
        entry = Entry(arrived_at=now, **given)
        return entry, self.dispatcher.submit(entry, weight, now)

    def end(self, entry: Entry, now: float = 0.0, held_s: float = 1.0) -> None:
        (link,) = [link for link in self.links if entry in link.produced]
        self.dispatcher.ended(entry, held_s, link.produced.pop(entry), now)
        self.dispatcher.pump(now)

    def lose(self, entry: Entry, now: float = 0.0) -> None:
        (link,) = [link for link in self.links if entry in link.produced]
        del link.produced[entry]
        self.dispatcher.put_back([entry], now, lost=True)


def test_a_request_for_a_taken_slot_waits_until_it_is_free() -> None:
    played = Played(1)
    first, second = played.arrive()[0], played.arrive()[0]
    assert (played.sent, played.timers) == ([(first, "0")], {second: None})
    played.end(first)
    assert (played.sent[1:], played.dispatcher.waiting) == ([(second, "0")], 0)


def test_a_replica_that_is_busy_after_all_is_passed_over() -> None:
    """The request goes to the next one, and its tenant pays once."""
    played = Played(2, 1)
    played.busy = {"0"}
    played.arrive(tenant="b")
    entry, _ = played.arrive(tenant="a", tokens=10)
    assert [link for _, link in played.sent] == ["1"]
    played.busy = set()
    played.links[0].slots = 2
    played.dispatcher.pump(0.0)
    assert played.sent[1:] == [(entry, "0")]
    assert played.dispatcher.lines[0].counter("a") == 10.0


def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    played = Played(1)
    played.dispatcher.mean_service_s = 20.0
    played.arrive()
    _, refusal = played.arrive(deadline=5.0)
    assert refusal == Unreachable(20.0, 5.0)
    assert played.dispatcher.headroom.present == 1
    assert played.arrive(deadline=20.0)[1] is None


def test_slots_that_are_reserved_for_others_lengthen_the_predicted_wait() -> None:
    played = Played(2)
    played.dispatcher.mean_service_s = 20.0
    played.end(played.arrive(priority=-1)[0], held_s=20.0)
    played.arrive()
    assert played.arrive(deadline=5.0)[1] == Unreachable(20.0, 5.0)


def test_the_settings_bound_every_wait() -> None:
    """A timer that fires a little early ends the wait, too."""
    played = Played(1, max_wait_s=3.0)
    played.arrive()
    entry, _ = played.arrive(now=1.0, deadline=60.0)
    assert (entry.deadline, played.timers[entry]) == (4.0, 3.0)
    played.dispatcher.waited(entry, 3.9995)
    assert played.refused == [(entry, Expired(3.9995 - 1.0))]


def test_a_held_request_waits_no_longer_than_its_deadline() -> None:
    played = Played(hold_s=10.0)
    entry, _ = played.arrive(deadline=3.0)
    assert played.timers == {entry: 3.0}


def test_the_longest_wait_is_that_of_the_oldest_waiting_request() -> None:
    played = Played(1)
    for arrived_at in (0.0, 1.0, 3.0):
        played.arrive(arrived_at)
    assert played.dispatcher.longest_wait_s(5.0) == 4.0


def test_the_next_place_is_free_when_one_request_more_has_left_the_line() -> None:
    played = Played(2)
    played.dispatcher.mean_service_s = 10.0
    for _ in range(2):
        played.arrive()
    assert [played.dispatcher.next_place_s(waiting) for waiting in (0, 1, 2)] == [math.inf, 5.0, 5.0]
    played.links.clear()
    assert played.dispatcher.next_place_s(1) == math.inf


def test_only_answered_requests_count_for_the_mean_service_time() -> None:
    played = Played(1)
    entry, _ = played.arrive()
    played.dispatcher.ended(entry, 50.0, 0, 0.0, answered=False)
    assert played.dispatcher.mean_service_s == 1.0


def test_a_cleared_dispatcher_holds_only_live_requests() -> None:
    played = Played(1)
    played.arrive()
    second, _ = played.arrive()
    assert played.dispatcher.clear(0.0) == [second]
    assert (played.dispatcher.waiting, second.waits, played.dispatcher.headroom.present) == (0, False, 1)


def test_a_full_line_names_how_many_wait_in_it() -> None:
    played = Played(1, max_queue=1)
    for _ in range(2):
        played.arrive()
    _, refusal = played.arrive()
    assert isinstance(refusal, Full)
    assert (refusal.cause.dimension, refusal.waiting) == ("count", 1)


def test_an_urgent_request_evicts_the_last_of_a_full_line() -> None:
    played = Played(1, max_queue=1)
    played.arrive()
    low, _ = played.arrive(priority=1)
    _, refusal = played.arrive()
    assert refusal is None
    assert [entry for entry, _ in played.refused] == [low]


def test_an_urgent_request_with_a_free_slot_evicts_no_other() -> None:
    """The slot is free, although a request waits, because it is reserved for urgent ones."""
    played = Played(2, max_queue=1)
    played.end(played.arrive(priority=-1)[0])
    played.arrive()
    low, _ = played.arrive()
    high, _ = played.arrive(priority=-1)
    assert (played.sent[-1][0], low.waits, played.refused) == (high, True, [])


def test_new_settings_bound_the_line_and_keep_the_order_of_arrival() -> None:
    played = Played(1)
    live, first, second = (played.arrive(float(now))[0] for now in range(3))
    played.dispatcher.update(QueueSettings(queue_order="deadline", max_queue=2))
    assert isinstance(played.arrive(3.0)[1], Full)
    played.dispatcher.update(QueueSettings(queue_order="deadline", max_queue=3))
    assert played.arrive(4.0)[1] is None
    played.end(live)
    played.end(first)
    assert [entry for entry, _ in played.sent] == [live, first, second]


def test_a_waiting_request_that_grows_takes_room_in_its_line() -> None:
    played = Played(1, max_queue_bytes=10)
    played.arrive()
    waiting, _ = played.arrive()
    waiting.chain = [1]
    played.dispatcher.resized(waiting, 8)
    refusal = played.arrive(size=2)[1]
    assert isinstance(refusal, Full)
    assert (refusal.cause.dimension, refusal.cause.used, waiting.chain) == ("bytes", 9, None)


def test_a_model_without_replicas_holds_requests_for_hold_s() -> None:
    """From their arrival, or from the loss of the last replica."""
    played = Played(1, hold_s=10.0)
    played.arrive()
    waiting, _ = played.arrive(now=1.0)
    played.links.clear()
    played.dispatcher.hold(5.0)
    late, _ = played.arrive(now=6.0)
    assert played.timers == {waiting: 10.0, late: 10.0}
    played.dispatcher.waited(waiting, 15.0)
    assert played.refused == [(waiting, NotStarted(14.0))]


def test_a_request_that_is_no_longer_held_waits_on() -> None:
    played = Played(hold_s=10.0)
    entry, _ = played.arrive()
    played.links.append(PlayedLink("0", 0))
    played.dispatcher.waited(entry, 10.0)
    assert (played.timers, played.refused) == ({entry: None}, [])


def test_slots_are_reserved_for_urgent_requests() -> None:
    """The recent peak of the urgent ones, up to half of the slots."""
    played = Played(2)
    urgent, _ = played.arrive(priority=-1)
    played.end(urgent)
    played.arrive()
    low, _ = played.arrive()
    assert played.dispatcher.waiting == 1
    high, _ = played.arrive(priority=-1)
    assert [entry for entry, _ in played.sent[2:]] == [high]
    assert low.waits


def test_a_new_request_moves_the_line_when_a_reserve_has_lapsed() -> None:
    played = Played(2)
    played.end(played.arrive(priority=-1)[0])
    played.arrive()
    waiting, _ = played.arrive()
    played.arrive(now=200.0)
    assert played.sent[-1][0] is waiting


def test_canary_requests_go_to_canary_replicas_while_there_are_any() -> None:
    played = Played(1, 1, canary=1.0, canaries=("1",))
    first, second = played.arrive()[0], played.arrive()[0]
    assert (first.canary, second.canary, played.sent) == (True, True, [(first, "1")])
    assert [line.count for line in played.dispatcher.lines] == [0, 1]
    played.links.pop()
    played.dispatcher.pump(0.0)
    assert played.sent[1:] == [(second, "0")]


def test_a_session_returns_to_its_replica() -> None:
    played = Played(4, 4)
    played.arrive(tenant="x")
    home, _ = played.arrive(session="s")
    returned, _ = played.arrive(session="s")
    homes = dict(played.sent)
    assert (homes[home], returned.affinity) == (homes[returned], "session")


def test_a_prompt_goes_where_its_prefix_is_cached() -> None:
    played = Played(4, 4)
    played.prefix_block = 2
    for link in played.links:
        link.prefixes = PrefixIndex(100)
    first, _ = played.arrive(prompt_ids=[1, 2, 3, 4])
    other, _ = played.arrive(prompt_ids=[5, 6, 7, 8])
    again, _ = played.arrive(prompt_ids=[1, 2, 3, 4, 9, 9])
    homes = dict(played.sent)
    assert homes[first] != homes[other]
    assert (homes[again], again.affinity) == (homes[first], "prefix")


def test_a_short_common_prefix_is_no_reason_to_prefer_a_replica() -> None:
    """One block of five is less than a quarter of the prompt."""
    played = Played(4, 4)
    played.prefix_block = 2
    for link in played.links:
        link.prefixes = PrefixIndex(100)
    first, _ = played.arrive(prompt_ids=[1, 2])
    second, _ = played.arrive(prompt_ids=[1, 2, 9, 9, 8, 8, 7, 7, 6, 6])
    homes = dict(played.sent)
    assert (second.affinity, homes[first] == homes[second]) == ("", False)


def test_a_cached_prompt_outweighs_the_replica_of_the_session() -> None:
    played = Played(4, 4)
    played.prefix_block = 2
    for link in played.links:
        link.prefixes = PrefixIndex(100)
    cached, _ = played.arrive(prompt_ids=[1, 2, 3, 4])
    home, _ = played.arrive(session="s")
    played.arrive()  # the replica with the prompt has fewer free slots now
    returned, _ = played.arrive(session="s", prompt_ids=[1, 2, 3, 4])
    homes = dict(played.sent)
    assert homes[returned] == homes[cached] != homes[home]


def test_a_blocked_request_is_not_overtaken_and_goes_once_it_is_free() -> None:
    played = Played(1)
    first, second = played.arrive()[0], played.arrive()[0]
    blocked = {id(second)}
    played.dispatcher.blocked = lambda entry: id(entry) in blocked
    played.end(first)
    third, _ = played.arrive()
    assert (second.waits, third.waits) == (True, True)
    blocked.clear()
    played.arrive()
    assert [entry for entry, _ in played.sent] == [first, second]


def test_a_blocked_request_holds_up_its_line_and_not_its_own_end() -> None:
    played = Played(1)
    first, second = played.arrive()[0], played.arrive()[0]
    played.dispatcher.blocked = lambda entry: entry is second
    played.end(first)
    assert played.dispatcher.waiting == 1
    played.dispatcher.withdraw(second, 0.0)
    assert (played.dispatcher.waiting, played.dispatcher.headroom.present) == (0, 0)


def shared(*slots: int) -> Played:
    """Returns a dispatcher that counts tokens, since two tenants have sent requests."""
    played = Played(*slots)
    for tenant in "xy":
        played.end(played.arrive(tenant=tenant, tokens=0)[0])
    return played


def test_a_tenant_pays_for_its_prompt_and_twice_for_each_token_of_the_answer() -> None:
    played = shared(1)
    entry, _ = played.arrive(tenant="a", tokens=10)
    played.dispatcher.charge(entry, 5)
    played.dispatcher.charge(entry, 3)  # an older count
    assert played.dispatcher.lines[0].counter("a") == 20.0
    played.links[0].produced[entry] = 7
    played.end(entry)
    assert played.dispatcher.lines[0].counter("a") == 24.0


@pytest.mark.parametrize("lost", [True, False])
def test_a_request_that_is_sent_again_pays_for_its_prompt_once(lost: bool) -> None:
    """Its first answer is refunded, if its replica was lost."""
    played = shared(1)
    entry, _ = played.arrive(tenant="a", tokens=10)
    if lost:
        played.dispatcher.charge(entry, 5)
    played.links[0].produced.clear()
    played.links[0].slots = 0
    played.dispatcher.put_back([entry], 0.0, lost=lost)
    assert played.dispatcher.lines[0].counter("a") == (10.0 if lost else 0.0)
    played.links[0].slots = 1
    played.dispatcher.pump(0.0)
    assert played.dispatcher.lines[0].counter("a") == 10.0


def test_the_tokens_of_live_requests_decide_whose_turn_it_is() -> None:
    played = shared(2)
    long, short = played.arrive(tenant="a")[0], played.arrive(tenant="b")[0]
    played.arrive(tenant="a")
    other, _ = played.arrive(tenant="b")
    played.links[0].produced[long] = 50
    played.end(short)
    assert played.sent[-1][0] is other


def test_a_tenant_that_is_served_at_once_gets_no_credit_for_earlier_idle_time() -> None:
    played = shared(2)
    played.arrive(tenant="a", tokens=100)
    played.arrive(tenant="b", tokens=1)
    assert played.dispatcher.lines[0].counter("b") == 101.0


def test_weights_hold_in_new_lines_until_they_change() -> None:
    played = shared(2)
    played.arrive(tenant="a", tokens=0, weight=2.0)
    played.dispatcher.update(QueueSettings(canary=0.0))
    played.dispatcher.lines[0].charge("a", 20)
    assert played.dispatcher.lines[0].counter("a") == 10.0
    played.arrive(tenant="a", tokens=20, weight=4.0)
    assert played.dispatcher.lines[0].counter("a") == 15.0


@pytest.mark.parametrize("lost", [True, False])
def test_charges_to_earlier_lines_are_not_refunded_to_new_ones(lost: bool) -> None:
    """Otherwise the tenant would begin there with an unearned credit."""
    played = Played(2)
    live, _ = played.arrive(tenant="a", tokens=50)
    played.end(live)
    played.arrive(tenant="b")
    live, _ = played.arrive(tenant="a", tokens=50)
    dispatcher = played.dispatcher
    dispatcher.charge(live, 100)
    dispatcher.update(QueueSettings(canary=0.0))
    dispatcher.lines[0].charge("a", 500)
    dispatcher.charge(live, 130)
    assert dispatcher.lines[0].counter("a") == 560.0
    played.links[0].slots = 0
    dispatcher.put_back([live], 0.0, lost=lost)
    assert dispatcher.lines[0].counter("a") == (500.0 if lost else 560.0)
    assert live.carried <= live.charged


arrivals = st.tuples(
    st.just("arrive"),
    st.sampled_from("abc"),
    st.integers(-1, 1),
    st.sampled_from([None, 2.0, 30.0]),
)
steps = st.lists(
    arrivals | st.tuples(st.sampled_from(["end", "lose", "leave", "expire", "update"]), st.integers(0, 30)), max_size=60
)


@given(steps=steps, slots=st.lists(st.integers(1, 3), max_size=3), max_queue=st.integers(0, 6))
@search(50)
def test_every_request_is_in_one_place_and_counted_there(
    steps: list[tuple[Any, ...]], slots: list[int], max_queue: int
) -> None:
    """Each is in a line, in a slot, or over; lines and slots keep their limits; and no request of the only priority
    waits beside a free slot."""
    played = Played(*slots, max_queue=max_queue)
    dispatcher, entries, over = played.dispatcher, list[Entry](), set[Entry]()
    orders = ["fair", "deadline"]
    for now, (kind, *terms) in enumerate(steps):
        live = [entry for link in played.links for entry in link.produced]
        waiting = [entry for entry in entries if entry.waits]
        if kind == "arrive":
            tenant, priority, wait_s = terms
            deadline = None if wait_s is None else now + wait_s
            entry, refusal = played.arrive(now, tenant=tenant, priority=priority, deadline=deadline)
            entries.append(entry)
            over |= {entry} if refusal is not None else set()
        elif kind in ("end", "lose") and live:
            entry = live[terms[0] % len(live)]
            (played.end if kind == "end" else played.lose)(entry, float(now))
            over |= {entry} if kind == "end" else set()
        elif kind == "leave" and waiting:
            over.add(entry := waiting[terms[0] % len(waiting)])
            dispatcher.withdraw(entry, now)
        elif kind == "expire":
            for entry in waiting:
                if entry.deadline is not None and entry.deadline <= now:
                    dispatcher.waited(entry, now)
        elif kind == "update":
            dispatcher.update(QueueSettings(max_queue=max_queue, queue_order=orders[terms[0] % 2]))
        over |= {entry for entry, _ in played.refused}
        live = [entry for link in played.links for entry in link.produced]
        waiting = [entry for entry in entries if entry.waits]
        assert sorted(map(id, [*live, *waiting, *over])) == sorted(map(id, entries))
        assert sorted(map(id, dispatcher.entries)) == sorted(map(id, waiting))
        assert dispatcher.headroom.present == len(live) + len(waiting)
        assert all(link.free_slots >= 0 for link in played.links)
        if not dispatcher.headroom.mixed:
            assert not waiting or all(link.free_slots == 0 for link in played.links)
