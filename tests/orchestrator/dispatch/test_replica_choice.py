"""Which replica a request goes to."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from random import Random

import pytest

from orchestrator.dispatch.replica_choice import Pace, choose


@dataclass(frozen=True)
class Replica:
    """What the choice looks at."""

    name: str
    free_slots: int = 1
    prefilling: int = 0
    pace: float = 0.02
    stepped_at: float = 0.0


def chosen(*replicas: Replica, **affinity: float) -> set[str | None]:
    """The names of what is chosen in any order of the replicas."""

    def speaks_for(replica: Replica) -> float:
        return affinity.get(replica.name, 0.0)

    choices = (choose(order, speaks_for if affinity else None) for order in permutations(replicas))
    return {None if replica is None else replica.name for replica in choices}


def test_without_a_free_slot_a_request_waits() -> None:
    """Late binding: nowhere does it wait at a replica, even one that it has an affinity to."""
    assert chosen(Replica("a", 0), Replica("b", -1), a=1.0) == {None}
    assert choose([]) is None


def test_a_replica_in_prefill_is_avoided() -> None:
    """A replica without a prefill precedes a faster one with one, and one with an affinity."""
    assert chosen(Replica("a", 4, 1, 0.001), Replica("b", 1, 0), Replica("c", 0, 0), a=1.0) == {"b"}


def test_fewer_prefills_are_better_if_all_replicas_have_some() -> None:
    """The request waits for those before it."""
    assert chosen(Replica("a", 4, 3), Replica("b", 1, 2), Replica("c", 4, 4)) == {"b"}


def test_affinity_precedes_speed_and_never_waits() -> None:
    """A preference: if its replica has no slot, the request goes elsewhere at once."""
    assert chosen(Replica("a", 4, 0, 0.01), Replica("b", 1, 0, 0.04), b=0.4) == {"b"}
    assert chosen(Replica("a", 4, 0, 0.01), Replica("b", 1, 0, 0.04), Replica("c"), b=0.4, c=0.8) == {"c"}
    assert chosen(Replica("a", 4, 0, 0.01), Replica("b", 0, 0, 0.04), b=1.0) == {"a"}


def test_the_fastest_precedes_the_emptiest() -> None:
    """And an unmeasured replica both, so that it is measured."""
    assert chosen(Replica("a", 1, 0, 0.01), Replica("b", 4, 0, 0.04)) == {"a"}
    assert chosen(Replica("a", 1, 0, 0.01), Replica("b", 1, 0, 0.0)) == {"b"}


def test_the_emptiest_of_equals() -> None:
    """There a prefill stops the fewest decodes; a tie goes to the first."""
    assert chosen(Replica("a", 1), Replica("b", 3), Replica("c", 2)) == {"b"}
    assert choose([Replica("a"), Replica("b")]) == Replica("a")


def test_the_replica_whose_step_ends_first_is_preferred() -> None:
    """A prompt is read between two steps: among equals the one that has been in its step the longest, regardless of
    free slots; but not before a faster one, or one with an affinity.
    """
    replicas = [
        Replica(name, slots, stepped_at=at) for name, slots, at in (("a", 4, 2.2), ("b", 1, 2.1), ("c", 2, 2.3))
    ]
    assert chosen(*replicas) == {"b"}
    assert chosen(*replicas, Replica("fast", pace=0.01, stepped_at=2.4)) == {"fast"}
    assert chosen(*replicas, c=1.0) == {"c"}


def test_affinity_is_not_computed_if_it_cannot_count() -> None:
    """It may be expensive: replicas without a slot, or with more prefills than another, are skipped."""
    queried = []

    def speaks_for(replica: Replica) -> float:
        queried.append(replica.name)
        return 0.0

    choose([Replica("a"), Replica("b", 0), Replica("c", 1, 1), Replica("d")], speaks_for)
    assert queried == ["a", "d"]


def test_noise_does_not_distinguish_equal_replicas() -> None:
    """Answers whose seconds per token vary by half give paces that differ by one step at most."""
    random, paces = Random(1), [Pace() for _ in range(20)]
    for pace in paces:
        for _ in range(200):
            tokens = random.randint(5, 500)
            pace.ended(tokens * 0.0205 * random.uniform(0.75, 1.25), tokens)
    assert len({pace.value for pace in paces}) <= 2


def test_a_pace_follows_changes() -> None:
    """After some requests at half the speed it is twice the time, within a tenth of the measurement."""
    pace = Pace()
    assert pace.value == 0.0
    pace.ended(2.0, 100)
    assert pace.value == pytest.approx(0.02, rel=0.1)
    for _ in range(100):
        pace.ended(4.0, 100)
    assert pace.value == pytest.approx(0.04, rel=0.1)


def test_an_answer_without_a_second_token_is_not_measured() -> None:
    """Nor one whose tokens arrived at once."""
    pace = Pace()
    pace.ended(0.0, 5)
    pace.ended(1.0, 0)
    assert pace.value == 0.0
