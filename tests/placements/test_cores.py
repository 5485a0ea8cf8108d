from __future__ import annotations

import pytest

from placements.facts.core_range import CoreRange, contiguous, runs


@pytest.mark.parametrize("text", ["0", "5", "4-7", "0-23", "0-127"])
def test_notation_survives_parse_and_str(text: str) -> None:
    """A core range is printed as it was written."""
    assert str(CoreRange.parse(text)) == text


def test_one_core_written_as_a_range_is_printed_as_one_id() -> None:
    """NEURON_RT_VISIBLE_CORES of one core is "a", never "a-a"."""
    assert str(CoreRange.parse("4-4")) == "4"


@pytest.mark.parametrize(
    "text", ["", " 4", "4-", "-4", "4--7", "4-7-9", "a-b", "4.0", "07", "0x4", "９", "4-1000", "4\n"]
)
def test_other_notation_is_rejected_with_the_text_quoted(text: str) -> None:
    with pytest.raises(ValueError, match="is not a core range") as caught:
        CoreRange.parse(text)
    assert f'"{text}"' in str(caught.value)


def test_a_list_is_rejected_as_a_list() -> None:
    """A comma list has its own message."""
    with pytest.raises(ValueError, match='"0,1" is a list; a core range is contiguous'):
        CoreRange.parse("0,1")


def test_a_range_that_runs_backwards_is_rejected_with_its_remedy() -> None:
    """The message has the range the other way round."""
    with pytest.raises(ValueError, match=r'"7-4" runs backwards.*"4-7"'):
        CoreRange.parse("7-4")


@pytest.mark.parametrize(("first", "last"), [(-1, 3), (4, 3)])
def test_an_impossible_range_cannot_be_built(first: int, last: int) -> None:
    """No CoreRange is empty or negative."""
    with pytest.raises(ValueError):
        CoreRange(first, last)


def test_a_range_is_a_collection_of_core_ids() -> None:
    """len, iteration and `in` agree."""
    cores = CoreRange(4, 7)
    assert (len(cores), list(cores), 4 in cores, 8 in cores, "4" in cores) == (4, [4, 5, 6, 7], True, False, False)


@pytest.mark.parametrize(
    ("first", "other", "shared"), [("0-7", "4-11", "4-7"), ("0-7", "8-9", "None"), ("0-7", "7", "7"), ("2", "0-3", "2")]
)
def test_overlap_is_the_intersection(first: str, other: str, shared: str) -> None:
    """It is symmetric, and None if nothing is shared."""
    a, b = CoreRange.parse(first), CoreRange.parse(other)
    assert (str(a.overlap(b)), str(b.overlap(a))) == (shared, shared)


def test_alignment_is_that_of_the_first_core() -> None:
    """8-15 begins at a multiple of 8, 4-11 does not."""
    assert (CoreRange(8, 15).aligned(8), CoreRange(4, 11).aligned(8)) == (True, False)


def test_ranges_order_by_first_core() -> None:
    """Sorting puts ranges in the order of the host."""
    assert sorted([CoreRange(8, 9), CoreRange(0, 7), CoreRange(0, 3)]) == [
        CoreRange(0, 3),
        CoreRange(0, 7),
        CoreRange(8, 9),
    ]


def test_runs_are_cut_where_the_value_changes_or_a_core_is_missing() -> None:
    """One for each stretch of cores with one value, ascending."""
    held = {9: "b", 0: "a", 1: "a", 2: "b", 4: "b", 5: "b"}
    cut = [(str(cores), value) for cores, value in runs(held)]
    assert cut == [("0-1", "a"), ("2", "b"), ("4-5", "b"), ("9", "b")]


@pytest.mark.parametrize(("cores", "expected"), [([8, 9, 0], ["8-9", "0"]), ([5, 4], ["5", "4"]), ([], [])])
def test_consecutive_cores_are_one_range_in_their_order(cores: list[int], expected: list[str]) -> None:
    assert list(map(str, contiguous(cores))) == expected
