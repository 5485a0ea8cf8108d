"""What holds for every memory of prefixes, against lists of all that it was told.

EXAMPLES=300 searches longer than the few seconds of an ordinary run.
"""

from __future__ import annotations

import os

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.dispatch.prefix_index import PrefixIndex, Sessions, chain

EXAMPLES = int(os.environ.get("EXAMPLES", "60"))
BLOCK = 3

prompts = st.lists(st.integers(0, 1), max_size=20)
histories = st.lists(prompts, max_size=12)


def cut(prompt: list[int]) -> list[tuple[int, ...]]:
    return [tuple(prompt[at : at + BLOCK]) for at in range(0, len(prompt) - BLOCK + 1, BLOCK)]


def alike(one: list[tuple[int, ...]], other: list[tuple[int, ...]]) -> int:
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@settings(max_examples=EXAMPLES, deadline=None)
@given(histories, prompts)
def test_with_room_the_share_is_the_best_of_all_prompts(history: list[list[int]], prompt: list[int]) -> None:
    """The blocks in common with the prompt that begins most like it."""
    memory = PrefixIndex()
    for one in history:
        memory.add(chain(one, BLOCK))
    blocks = cut(prompt)
    best = max((alike(blocks, cut(one)) for one in history), default=0)
    assert memory.share(chain(prompt, BLOCK)) == (best / len(blocks) if blocks else 0.0)


@settings(max_examples=EXAMPLES, deadline=None)
@given(histories, prompts, st.integers(1, 8))
def test_a_small_memory_is_bounded_and_never_says_too_much(
    history: list[list[int]], prompt: list[int], room: int
) -> None:
    """At most its blocks; never more than with room, all of the latest that fits, and the same when asked again."""
    small, large = PrefixIndex(room), PrefixIndex()
    for one in history:
        small.add(chain(one, BLOCK))
        large.add(chain(one, BLOCK))
        assert len(small) <= room
        blocks = cut(one)
        assert not blocks or small.share(chain(one, BLOCK)) == min(room, len(blocks)) / len(blocks)
    assert small.share(chain(prompt, BLOCK)) <= large.share(chain(prompt, BLOCK))
    assert small.share(chain(prompt, BLOCK)) == small.share(chain(prompt, BLOCK))


@settings(max_examples=EXAMPLES, deadline=None)
@given(histories, st.integers(1, 8))
def test_what_is_remembered_of_a_prompt_is_its_beginning(history: list[list[int]], room: int) -> None:
    """Of any prompt of the past, the blocks that are known are all before those that are not: halving finds the end."""
    memory = PrefixIndex(room)
    for one in history:
        memory.add(chain(one, BLOCK))
    for one in history:
        known = [memory.share([digest]) == 1.0 for digest in chain(one, BLOCK)]
        assert known == sorted(known, reverse=True)
        assert memory.share(chain(one, BLOCK)) * len(known) == sum(known)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 2), st.sampled_from([0.0, 0.5, 3.0])), max_size=30),
    st.integers(1, 3),
)
def test_sessions_are_a_bounded_map_of_the_latest(calls: list[tuple[str, int, float]], most: int) -> None:
    """Whatever comes: the latest replica of a session, if it is among the latest and its time is not over."""
    sessions, now, told = Sessions[int](most, 4.0), 0.0, dict[str, tuple[int, float]]()
    for session, replica, passed in calls:
        now += passed
        sessions.put(session, replica, now)
        told.pop(session, None)
        told[session] = replica, now
        told = {key: value for key, value in list(told.items())[-most:] if now - value[1] < 4.0}
        assert len(sessions) == len(told)
        assert {key: sessions.get(key, now) for key in "abcd"} == {key: told.get(key, (None,))[0] for key in "abcd"}
