"""What a rollback leaves: the changes of the failed update go, later ones of other models stay."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.control.journal.journal_records import Revision
from orchestrator.control.resolve.resolved_revision import changing_specs, revert_change, revert_changes
from placements.facts.topology import Machine
from placements.spec.parse import parse
from placements.spec.schema import Spec

HEAD = "version: 1\nhosts: {emulate: inf2.48xlarge}\ndefaults: {engine: echo}\nmodels:\n"


def spec(models: str) -> Spec:
    parsed = parse(HEAD + models, "f.yaml", "/").spec
    assert parsed is not None
    return parsed


def revision(number: int, models: str, head: str = HEAD) -> Revision:
    return Revision(
        number=number, cause="apply", by="x", text=head + models, file="f.yaml", base_dir="/", of=None, plan={}
    )


leaves = st.integers(0, 2)
trees: Any = st.recursive(
    leaves, lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=8
)
mappings: Any = st.dictionaries(st.sampled_from("abc"), trees, max_size=3)


@given(mappings, mappings)
def test_a_change_that_was_not_modified_since_is_reverted_completely(before: Any, after: Any) -> None:
    """Without a change nothing is reverted."""
    assert revert_change(after, after, before) == before
    assert revert_change(before, after, after) == before


@given(mappings, mappings, mappings)
def test_keys_outside_the_change_stay(before: Any, after: Any, now: Any) -> None:
    """With any value; so do those that have changed again."""
    left = revert_change({**now, "kept": 1}, {**after, "kept": 2}, {**before, "kept": 3})
    assert left["kept"] == 1
    untouched = {key for key in "abc" if after.get(key) == before.get(key)}
    assert {key: left[key] for key in untouched & left.keys()} == {key: now[key] for key in untouched & now.keys()}


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        (["  a: {}\n", "  a: {max_batch: 2}\n"], [1]),
        (["  a: {}\n  b: {}\n", "  a: {max_batch: 2}\n  b: {}\n", "  a: {max_batch: 2}\n  b: {max_len: 64}\n"], [1]),
        (["  a: {}\n", "  a: {max_batch: 2}\n", "  a: {max_batch: 2, priority: 1}\n", "  a: {max_batch: 3}\n"], [3, 1]),
        (["  a: {}\n", "  a: {max_batch: 2}\n", "  a: {}\n", "  a: {max_batch: 2}\n"], [3]),
        (["  b: {}\n", "  b: {}\n  a: {}\n", "  b: {priority: 1}\n  a: {}\n"], [1]),
        (["  a: {}\n", "  a: {priority: 1}\n"], []),
    ],
)
def test_the_culprits_are_the_revisions_that_changed_the_process_of_the_failed_model(
    models: list[str], expected: list[int]
) -> None:
    """Since its version in the complete revision; fields of only the planner or the gateway are not a cause."""
    assert changing_specs([spec(text) for text in models], "a") == expected


MACHINE = Machine((0, 1))
A1, A2 = "  a: {tp_degree: 8}\n", "  a: {tp_degree: 8, max_batch: 2}\n"


def test_later_changes_of_other_models_stay() -> None:
    """Fields, new models and removed ones; the message lists them."""
    reverted = revert_changes(
        [
            revision(4, A1 + "  b: {}\n  gone: {}\n"),
            revision(5, A2 + "  b: {}\n  gone: {}\n  with_a: {}\n"),
            revision(6, A2 + "  b: {max_len: 64}\n  with_a: {}\n  new: {priority: 2}\n"),
        ],
        "a",
        MACHINE,
    )
    assert reverted is not None
    generation, numbers = reverted
    assert numbers == [5]
    assert generation.spec == parse(HEAD + A1 + "  b: {max_len: 64}\n  new: {priority: 2}\n", "f.yaml", "/").spec
    assert generation.revision.text.startswith("# revision 6 without the changes of 5\n")


@pytest.mark.parametrize(
    "revisions",
    [
        [revision(1, A1), revision(2, A2)],  # nothing else has changed
        [revision(1, A1), revision(2, A2), revision(3, A2.replace("2}", "3}"))],  # each has changed it
        [
            revision(1, A1 + "  b: {}\n"),
            revision(2, "  a: {}\n  b: {}\n"),
            revision(3, "  a: {}\n  b: {tp_degree: 24}\n"),
        ],
    ],
)
def test_if_nothing_else_can_stay_the_complete_revision_is_applied_again(revisions: list[Revision]) -> None:
    """Also if the rest would not fit beside the old version."""
    assert revert_changes(revisions, "a", MACHINE) is None


def test_a_shared_default_is_reverted_with_its_update() -> None:
    """The old process needs the old default."""
    head = HEAD.replace("echo}", "echo, max_len: 64}")
    reverted = revert_changes(
        [
            revision(1, "  a: {}\n  b: {}\n"),
            revision(2, "  a: {}\n  b: {}\n", head),
            revision(3, "  a: {}\n  b: {priority: 1}\n", head),
        ],
        "a",
        MACHINE,
    )
    assert reverted is not None
    assert reverted[0].spec == spec("  a: {}\n  b: {priority: 1}\n")
