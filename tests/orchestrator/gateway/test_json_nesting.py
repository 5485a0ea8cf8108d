"""The nesting of JSON is counted from its bytes, whatever its texts contain."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.gateway.http import exchange as json_nesting

LIMIT = 3
TEXTS = st.text(alphabet='[]{}"\\,:a \n\u00e4', max_size=8)
VALUES = st.recursive(
    TEXTS | st.integers() | st.none(),
    lambda parts: st.lists(parts, max_size=4) | st.dictionaries(TEXTS, parts, max_size=4),
    max_leaves=40,
)


def depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@given(VALUES, st.booleans())
def test_json_is_refused_exactly_above_the_limit(value: Any, ascii: bool) -> None:
    data = json.dumps(value, ensure_ascii=ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_nesting, "MAX_JSON_DEPTH", LIMIT)
        try:
            accepted = json_nesting.checked(data) is data
        except msgspec.DecodeError:
            accepted = False

    assert accepted == (depth(value) <= LIMIT)


def test_many_small_values_are_refused() -> None:
    data = b"[" + b"[]," * json_nesting.MAX_JSON_CONTAINERS + b"[]]"

    with pytest.raises(msgspec.DecodeError, match="more than 131072 lists and objects"):
        json_nesting.checked(data)
