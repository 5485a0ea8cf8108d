"""What holds for every line of waiting requests, and for every predicted wait."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.dispatch.fair_queue import W_OUTPUT, W_PROMPT, FairQueue
from orchestrator.dispatch.wait_prediction import RETRY_AFTER_S, predicted_wait_s, retry_after_s
from tests.searches import EXAMPLES, search

EFFORT = search(30, derandomize=not EXAMPLES)


@dataclass(frozen=True, eq=False)
class Item:
    """Something that waits."""

    number: int
    tenant: str = ""
    priority: int = 0
    deadline: float | None = None
    size: int = 1
    tokens: int = 1
    arrived_at: float = 0.0


def due(item: Item) -> tuple[float, float]:
    """Those without a deadline come last, and equal ones in the order of their arrival."""
    return math.inf if item.deadline is None else item.deadline, item.arrived_at


ITEMS = st.builds(
    Item,
    number=st.just(0),
    tenant=st.sampled_from("abc"),
    priority=st.sampled_from((-1, 0, 5)),
    deadline=st.none() | st.integers(0, 20).map(float),
    size=st.integers(0, 40),
    tokens=st.integers(1, 50),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(("push", "make room", "pass by")), ITEMS),
        st.tuples(st.sampled_from(("pop", "back", "remove")), st.integers(0, 30)),
        st.tuples(
            st.just("served"), st.tuples(st.sampled_from("abc"), st.sampled_from((-1, 0, 5)), st.integers(0, 99))
        ),
    ),
    max_size=60,
)


class Model:
    """A line beside plain lists that say what must be in it, and in which order for each priority and tenant."""

    def __init__(self, order: str) -> None:
        self.line: FairQueue[Item] = FairQueue(8, 150, order=order)  # type: ignore[arg-type, type-var]
        self.lanes: dict[tuple[int, str], list[Item]] = {}
        self.out: list[Item] = []  # popped
        self.number = 0

    @property
    def items(self) -> list[Item]:
        return [item for lane in self.lanes.values() for item in lane]

    def new(self, drawn: Item) -> Item:
        self.number += 1
        given = drawn.tenant, drawn.priority, drawn.deadline, drawn.size, drawn.tokens
        return Item(self.number, *given, arrived_at=float(self.number))

    def lane(self, item: Item) -> list[Item]:
        return self.lanes.setdefault((item.priority, item.tenant), [])

    def do(self, what: str, about: object) -> None:
        if isinstance(about, Item):
            item = self.new(about)
            if what == "pass by":
                self.line.pass_by(item)
                return
            if what == "make room":
                for left in self.line.make_room(item):
                    assert self.lane(left)[-1] is left, "the last of its tenant gives way"
                    self.lane(left).pop()
            self.push(item)
        elif isinstance(about, tuple):
            tenant, priority, tokens = about
            self.line.charge(tenant, 0, tokens, priority)
        elif what == "pop" and self.items:
            self.pop()
        elif what == "back" and self.out:
            item = self.out.pop()
            self.line.put_back(item)
            self.lane(item).insert(0, item)
        elif what == "remove" and self.items:
            assert isinstance(about, int)
            item = self.items[about % len(self.items)]
            assert self.line.remove(item)
            self.lane(item).remove(item)
            assert not self.line.remove(item)

    def push(self, item: Item) -> None:
        fits = len(self.items) < 8 and sum(queued.size for queued in self.items) + item.size <= 150
        refusal = self.line.refusal(item)
        if fits:
            assert refusal is None
            self.line.push(item)
            self.lane(item).append(item)
        else:
            assert refusal is not None
            assert refusal.used + refusal.needed > refusal.limit

    def pop(self) -> None:
        peeked = self.line.peek()
        item = self.line.pop()
        assert item is peeked
        assert item.priority == min(queued.priority for queued in self.items)
        rivals = [lane for (priority, _), lane in self.lanes.items() if lane and priority == item.priority]
        if self.line.order == "fair":
            assert self.lane(item)[0] is item
            counters = {lane[0].tenant: self.line.counter(lane[0].tenant, item.priority) for lane in rivals}
            assert counters[item.tenant] == min(counters.values())
        else:
            assert due(item) == min(due(queued) for lane in rivals for queued in lane)
        self.lane(item).remove(item)
        self.out.append(item)

    def check(self) -> None:
        items = self.items
        assert Counter(map(id, self.line)) == Counter(map(id, items)), "nothing is lost, nothing is there twice"
        assert len(self.line) == len(items)
        assert self.line.bytes == sum(item.size for item in items)


@EFFORT
@given(STEPS, st.sampled_from(("fair", "deadline")))
def test_a_line_holds_what_it_was_given_in_its_order(steps: list[tuple[str, object]], order: str) -> None:
    """Whatever happens: nothing is lost or there twice; the next is of the lowest priority, of the tenant with the
    lowest counter (or the first deadline), and of one tenant the first that came; what was put back is before all
    others of its priority and tenant; and a line refuses exactly what exceeds its bounds."""
    model = Model(order)
    for what, about in steps:
        model.do(what, about)
        model.check()
    left = [id(item) for item in model.items]
    assert sorted(id(item) for item in model.line.clear()) == sorted(left)
    assert (len(model.line), model.line.bytes, model.line.peek()) == (0, 0, None)


@EFFORT
@given(STEPS, ITEMS)
def test_ahead_of_counts_at_least_its_own_and_at_most_all(steps: list[tuple[str, object]], drawn: Item) -> None:
    """Those of its own tenant and of lower priorities are ahead of a newcomer, and never more than there are; who
    comes later is never told less than who came before it."""
    model = Model("fair")
    for what, about in steps:
        model.do(what, about)
    model.line.max_count, model.line.max_bytes = 10**6, 10**6
    item = model.new(drawn)
    first = model.line.ahead_of(item)
    lower = sum(queued.priority < item.priority for queued in model.items)
    assert lower + len(model.lane(item)) <= first <= sum(queued.priority <= item.priority for queued in model.items)
    model.line.push(item)
    assert model.line.ahead_of(item) == first
    assert model.line.ahead_of(model.new(drawn)) > first


@dataclass(frozen=True)
class Tenant:
    """How long its requests are, and its weight."""

    prompt: int
    output: int
    weight: float


TENANTS = st.lists(
    st.builds(Tenant, st.integers(1, 60), st.integers(1, 20), st.sampled_from((0.5, 1.0, 3.0))), min_size=2, max_size=4
)


class Server:
    """Static slots before a line in which every tenant always has requests."""

    def __init__(self, tenants: list[Tenant], slots: int, seed: int) -> None:
        self.tenants, self.slots, self.random = tenants, slots, Random(seed)
        self.line: FairQueue[Item] = FairQueue(10**6, 10**9)  # type: ignore[type-var]
        self.live: list[tuple[Item, int]] = []  # and tokens to come
        self.service = [0.0] * len(tenants)  # in weighted tokens, over the tenant's weight
        for number, tenant in enumerate(tenants):
            self.line.set_weight(str(number), tenant.weight)
        for number in range(len(tenants)):
            self.more(number)
            self.more(number)

    def more(self, number: int) -> None:
        self.line.push(Item(0, str(number), tokens=self.random.randint(1, self.tenants[number].prompt)))

    def serve(self, item: Item, prompt: int, output: int) -> None:
        self.line.charge(item.tenant, prompt, output)
        tenant = int(item.tenant)
        self.service[tenant] += (W_PROMPT * prompt + W_OUTPUT * output) / self.tenants[tenant].weight

    def step(self) -> None:
        """Every live request gets a token; then free slots are filled."""
        going = []
        for item, left in self.live:
            self.serve(item, 0, 1)
            if left > 1:
                going.append((item, left - 1))
        self.live = going
        while len(self.live) < self.slots:
            item = self.line.pop()
            self.serve(item, item.tokens, 0)
            self.more(int(item.tenant))
            self.live.append((item, self.random.randint(1, self.tenants[int(item.tenant)].output)))


@EFFORT
@given(TENANTS, st.integers(1, 4), st.integers(0, 99))
def test_service_of_backlogged_tenants_differs_by_no_more_than_the_bound(
    tenants: list[Tenant], slots: int, seed: int
) -> None:
    """Over any time in which two tenants always have requests waiting, the weighted tokens that they get, over their
    weights, differ by at most 2 U (theorem 4.4 of the paper): U is the larger of a prompt's charge and of that of all
    tokens of a full batch, over the smallest weight."""
    server = Server(tenants, slots, seed)
    longest = max(tenant.prompt for tenant in tenants)
    batch = slots * max(tenant.prompt + tenant.output for tenant in tenants)
    bound = max(W_PROMPT * longest, W_OUTPUT * batch) / min(tenant.weight for tenant in tenants)
    history = [[0.0] * len(tenants)]
    for _ in range(400):
        server.step()
        history.append(list(server.service))
    for number in range(len(tenants)):
        for other in range(number):
            gaps = [service[number] - service[other] for service in history]
            assert max(gaps) - min(gaps) <= 2 * bound + 1e-6  # any two moments are the ends of an interval


@EFFORT
@given(st.integers(1, 50), st.integers(0, 2000), st.integers(0, 9))
def test_who_was_away_has_saved_nothing_up(charged: int, away: int, here: int) -> None:
    """A tenant that comes back is never below all those that wait: what it did not use meanwhile is gone."""
    line: FairQueue[Item] = FairQueue(100, 1000)  # type: ignore[type-var]
    for number in range(here):
        line.push(Item(number, f"other {number}"))
        line.charge(f"other {number}", away + number)
    line.charge("back", charged)
    line.push(Item(99, "back"))
    others = [line.counter(f"other {number}") for number in range(here)]
    assert line.counter("back") == max(charged, min(others, default=0.0))


WAITS = st.tuples(
    st.integers(0, 300),
    st.integers(1, 40),
    st.floats(0.001, 100.0),
    st.lists(st.floats(0.0, 200.0) | st.just(math.inf), max_size=40),
)


@EFFORT
@given(WAITS, st.floats(0.0, 50.0), st.data())
def test_a_wait_is_never_predicted_shorter_for_more_before_it(
    wait: tuple[int, int, float, list[float]], allowed: float, data: st.DataObject
) -> None:
    """With more requests ahead, a longer mean service, another slot taken, or requests that may last longer, neither
    the predicted wait nor Retry-After becomes less."""
    ahead, slots, mean, taken = wait
    taken = taken[:slots]
    worse = [(ahead + 1, slots, mean, taken), (ahead, slots, mean * 1.5, taken)]
    if len(taken) < slots:
        worse.append((ahead, slots, mean, [*taken, data.draw(st.floats(0.0, 200.0))]))
    if taken:
        index = data.draw(st.integers(0, len(taken) - 1))
        worse.append((ahead, slots, mean, [*taken[:index], taken[index] + 1.0, *taken[index + 1 :]]))
    before = predicted_wait_s(ahead, slots, mean, taken)
    for case in worse:
        after = predicted_wait_s(*case)
        assert after >= before * (1 - 1e-9)
        assert RETRY_AFTER_S[0] <= retry_after_s(before, allowed) <= retry_after_s(after * (1 + 1e-9), allowed)
