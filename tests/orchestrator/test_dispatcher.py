"""The dispatcher: which request gets which slot, which wait, and which are refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
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
from orchestrator.dispatch.prefix_index import PrefixIndex


@dataclass(eq=False)
class PlayedLink:
    """A link whose requests produce what the test says."""

    id: str
    slots: int
    prefixes: PrefixIndex | None = None
    produced: dict[Entry, int] = field(default_factory=dict)
    prefilling: int = 0
    pace: float = 0.0

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
    """A dispatcher, its links, and a record of what it has others do."""

    def __init__(self, *slots: int, **chosen: Any) -> None:
        self.links = [PlayedLink(str(i), count) for i, count in enumerate(slots)]
        self.prefix_block = 0
        self.sent: list[tuple[Entry, str]] = []
        self.timers: dict[Entry, float | None] = {}
        self.refused: list[tuple[Entry, Refusal]] = []
        self.busy: set[str] = set()  # replicas without a slot, which the gateway does not know
        self.dispatcher: Dispatcher[Entry, PlayedLink] = Dispatcher(
            QueueSettings(**{"hold_s": 60.0} | chosen), self, self, stepped_at=lambda link: 0.0
        )

    def __iter__(self) -> Iterator[PlayedLink]:
        return iter(self.links)

    @property
    def slots(self) -> int:
        return sum(link.slots for link in self.links)

    @property
    def routed(self) -> bool:
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
        self.dispatcher.put_back(entry, lost=True)
        self.dispatcher.resume((entry,), now)


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
    played.dispatcher.waits.mean_service_s = 20.0
    played.arrive()
    _, refusal = played.arrive(deadline=5.0)
    assert refusal == Unreachable(20.0, 5.0)
    assert played.dispatcher.headroom.present == 1


def test_the_settings_bound_every_wait() -> None:
    played = Played(1, max_wait_s=3.0)
    played.arrive()
    entry, _ = played.arrive(now=1.0, deadline=60.0)
    assert (entry.deadline, played.timers[entry]) == (4.0, 3.0)
    played.dispatcher.waited(entry, 4.0)
    assert played.refused == [(entry, Expired(3.0))]


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


def test_canary_requests_go_to_canary_replicas_while_there_are_any() -> None:
    played = Played(1, 1, canary=1.0, canaries=("1",))
    first, second = played.arrive()[0], played.arrive()[0]
    assert (first.canary, second.canary, played.sent) == (True, True, [(first, "1")])
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


def test_a_blocked_request_holds_up_its_line_and_not_its_own_end() -> None:
    played = Played(1)
    first, second = played.arrive()[0], played.arrive()[0]
    played.dispatcher.blocked = lambda entry: entry is second
    played.end(first)
    assert played.dispatcher.waiting == 1
    played.dispatcher.withdraw(second, 0.0)
    assert (played.dispatcher.waiting, played.dispatcher.headroom.present) == (0, 0)


@pytest.mark.parametrize("lost", [True, False])
def test_charges_to_earlier_lines_are_not_refunded_to_new_ones(lost: bool) -> None:
    """Else the tenant would begin there with a head start that it has not earned."""
    played = Played(2)
    live, _ = played.arrive(tenant="a", tokens=50)
    played.end(live)
    played.arrive(tenant="b")
    live, _ = played.arrive(tenant="a", tokens=50)
    dispatcher = played.dispatcher
    dispatcher.charge(live, 100)
    dispatcher.update(QueueSettings(canary=0.0))
    dispatcher.charge(live, 130)
    before = dispatcher.lines[0].counter("a")
    dispatcher.put_back(live, lost=lost)
    assert (before > 0, dispatcher.lines[0].counter("a")) == (True, 0.0 if lost else before)
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
@settings(max_examples=150, deadline=None)
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
