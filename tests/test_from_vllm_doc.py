"""docs/from-vllm-and-lmi.md: what it says of a flag, a property or a request field is what corewright says of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from orchestrator.gateway import protocol
from orchestrator.gateway.errors import ApiError
from placements.parse import parse

PAGE = Path(__file__).parent.parent / "docs" / "from-vllm-and-lmi.md"


def table(mark: str) -> list[list[str]]:
    """The rows below a mark, without their heading."""
    text = PAGE.read_text().partition(f"<!-- {mark} -->")[2].partition("<!-- end -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:2] == "| "]
    assert len(rows) > 3
    return rows[1:]


def words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


NAMES = [
    (name.removeprefix("--").replace("-", "_"), words(here)[0])
    for vllm, lmi, here in table("aliases")
    for name in [*words(vllm), *words(lmi)]
]


@pytest.mark.parametrize(("name", "field"), NAMES)
def test_a_name_of_theirs_is_told_to_be_our_field(name: str, field: str) -> None:
    """By the finding of `validate`, where the name is not the same."""
    *above, last = field.split(".")
    body = f"{name}: 1"
    for key in above:
        body = f"{key}: {{{body}}}"
    found = parse(f"models: {{m: {{source: ./m, {body}}}}}\n".encode(), "spec.yaml", "/")

    hints = [problem.hint for problem in found.problems if problem.id == "unknown-key"]

    assert hints == ([] if name == last else [f'did you mean "{last}"?'])


FIELDS = [(name, here) for fields, here in table("refused") for name in words(fields)]


@pytest.mark.parametrize(("name", "here"), FIELDS)
def test_a_request_field_of_theirs_is_refused_with_ours(name: str, here: str) -> None:
    """In the message, whose parameter is the field."""
    with pytest.raises(ApiError) as refused:
        protocol.read_completion(json.dumps({"model": "m", "prompt": "x", name: {}}).encode())

    assert refused.value.param == name
    assert str(refused.value).startswith(f"Unrecognized request argument supplied: {name}; here: ")
    assert words(here)[0].partition(" ")[0] in str(refused.value)


def test_every_field_with_an_answer_is_on_the_page() -> None:
    """And no other."""
    assert {name for name, _ in FIELDS} == set(protocol._INSTEAD)
