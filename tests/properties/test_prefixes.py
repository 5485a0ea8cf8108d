"""What holds for every memory of prefixes, against lists of all that it was told."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.dispatch.replica_choice import PrefixIndex, Sessions, chain
from tests.searches import search

BLOCK = 3

prompts = st.lists(st.integers(0, 1), max_size=20)
histories = st.lists(prompts, max_size=12)


def cut(prompt: list[int]) -> list[tuple[int, ...]]:
    return [tuple(prompt[at : at + BLOCK]) for at in range(0, len(prompt) - BLOCK + 1, BLOCK)]


def alike(first: list[tuple[int, ...]], other: list[tuple[int, ...]]) -> int:
    pairs = zip(first, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(other)))


@search(40)
@given(histories, prompts)
def test_with_room_the_share_is_the_best_of_all_prompts(history: list[list[int]], prompt: list[int]) -> None:
    """The blocks in common with the prompt that begins most like it."""
    memory = PrefixIndex()
    for prompt_seen in history:
        memory.add(chain(prompt_seen, BLOCK))
    blocks = cut(prompt)
    best = max((alike(blocks, cut(prompt_seen)) for prompt_seen in history), default=0)
    assert memory.share(chain(prompt, BLOCK)) == (best / len(blocks) if blocks else 0.0)


@search(40)
@given(histories, prompts, st.integers(1, 8))
def test_a_small_memory_is_bounded_and_never_says_too_much(
    history: list[list[int]], prompt: list[int], room: int
) -> None:
    """At most its blocks; never more than with room, all of the latest that fits, and the same when asked again."""
    small, large = PrefixIndex(room), PrefixIndex()
    for past in history:
        small.add(chain(past, BLOCK))
        large.add(chain(past, BLOCK))
        assert len(small) <= room
        blocks = cut(past)
        assert not blocks or small.share(chain(past, BLOCK)) == min(room, len(blocks)) / len(blocks)
    assert small.share(chain(prompt, BLOCK)) <= large.share(chain(prompt, BLOCK))
    assert small.share(chain(prompt, BLOCK)) == small.share(chain(prompt, BLOCK))


@search(40)
@given(histories, st.integers(1, 8))
def test_what_is_remembered_of_a_prompt_is_its_beginning(history: list[list[int]], room: int) -> None:
    """Of any prompt of the past, the blocks that are known are all before those that are not: halving finds the end."""
    memory = PrefixIndex(room)
    for past in history:
        memory.add(chain(past, BLOCK))
    for past in history:
        remembered = [memory.share([digest]) == 1.0 for digest in chain(past, BLOCK)]
        assert remembered == sorted(remembered, reverse=True)
        assert memory.share(chain(past, BLOCK)) * len(remembered) == sum(remembered)


@search(40)
@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 2), st.sampled_from([0.0, 0.5, 3.0])), max_size=30),
    st.integers(1, 3),
)
def test_sessions_are_a_bounded_map_of_the_latest(calls: list[tuple[str, int, float]], most: int) -> None:
    """Whatever comes: the latest replica of a session, if it is among the latest and its time is not over."""
    sessions, now, expected = Sessions[int](most, 4.0), 0.0, dict[str, tuple[int, float]]()
    for session, replica, passed in calls:
        now += passed
        sessions.put(session, replica, now)
        expected.pop(session, None)
        expected[session] = replica, now
        expected = {key: value for key, value in list(expected.items())[-most:] if now - value[1] < 4.0}
        assert len(sessions) == len(expected)
        assert {key: sessions.get(key, now) for key in "abcd"} == {key: expected.get(key, (None,))[0] for key in "abcd"}
