from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.batching.buckets import (
    checked_buckets,
    default_decode_buckets,
    default_prefill_buckets,
    ladder,
    smallest_bucket,
)

ladders = st.lists(st.integers(1, 5000), min_size=1, max_size=12, unique=True).map(sorted)


@given(ladders, st.integers(0, 6000))
def test_a_length_goes_to_the_smallest_bucket_that_holds_it_or_to_none(buckets: list[int], length: int) -> None:
    """A length is never cut: beyond the largest bucket there is an error, and never the largest."""
    fitting = [bucket for bucket in buckets if bucket >= length]
    if fitting:
        assert smallest_bucket(buckets, length) == min(fitting)
    else:
        with pytest.raises(ValueError, match=f"no bucket holds {length} "):
            smallest_bucket(buckets, length)


@given(st.integers(1, 300), st.integers(1, 100_000))
def test_a_ladder_ascends_at_most_doubling_to_exactly_the_longest(shortest: int, longest: int) -> None:
    """No length is padded to more than its double (or the shortest rung), and the longest is a rung itself."""
    rungs = ladder(shortest, longest)
    assert rungs[-1] == longest
    assert all(a < b <= 2 * a for a, b in pairwise(rungs))


@given(st.integers(2, 100_000))
def test_default_buckets_hold_a_full_slot(max_len: int) -> None:
    """Whatever fits into a slot has a bucket for its prompt and for its KV cache."""
    assert default_prefill_buckets(max_len)[-1] == default_decode_buckets(max_len)[-1] == max_len


def test_a_ladder_shorter_than_its_first_rung_has_one_rung() -> None:
    """A slot smaller than the shortest bucket still gets one that is not longer than the slot."""
    assert ladder(64, 10) == (10,)


@pytest.mark.parametrize("buckets", [[0, 8], [8, 8], [16, 8], [8, 300]])
def test_wrong_buckets_are_refused(buckets: list[int]) -> None:
    """Unsorted, repeated, not positive or too long buckets are named as such."""
    with pytest.raises(ValueError, match="bucket"):
        checked_buckets("prefill", buckets, 256)
