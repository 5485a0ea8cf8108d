"""How a request wants to be served, from headers, body and key."""

from __future__ import annotations

import pytest

from orchestrator.access.keys import ApiKey
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.serving.ticket import (
    MAX_SESSION_BYTES,
    SchedulingParameters,
    read_scheduling_parameters,
)

KEY = ApiKey(
    id="0123abcd", name="k", digest="0" * 64, scopes=("inference",), models=(), created=0.0, expires=None, weight=2.0
)


def test_a_request_without_terms_has_the_defaults() -> None:
    assert read_scheduling_parameters({}, None, None, 5.0) == SchedulingParameters()


def test_headers_set_deadline_session_and_explanation() -> None:
    """The deadline counts from now on."""
    headers = {b"x-deadline-ms": b"1500", b"x-session-id": b" abc ", b"x-corewright-explain": b"1"}
    terms = read_scheduling_parameters(headers, None, 3, 5.0)
    assert terms == SchedulingParameters(priority=3, deadline=6.5, session=" abc", explains=True)


def test_a_key_is_a_tenant_with_its_weight() -> None:
    """Two keys with the same session name have two sessions."""
    terms = read_scheduling_parameters({b"x-session-id": b"s"}, KEY, None, 0.0)
    assert (terms.tenant, terms.weight, terms.session) == ("0123abcd", 2.0, "0123abcd s")


@pytest.mark.parametrize(("own", "wanted", "is_"), [(0, -5, 0), (0, 4, 4), (-3, -5, -3), (-3, None, -3), (2, None, 2)])
def test_a_request_is_at_most_as_urgent_as_its_key_allows(own: int, wanted: int | None, is_: int) -> None:
    import msgspec.structs

    assert read_scheduling_parameters({}, msgspec.structs.replace(KEY, priority=own), wanted, 0.0).priority == is_


@pytest.mark.parametrize("given", [b"0", b"-1", b"x", b"inf", b"nan", b"1e9", b""])
def test_a_deadline_is_a_number_of_milliseconds(given: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        read_scheduling_parameters({b"x-deadline-ms": given}, None, None, 0.0)
    assert (caught.value.status, caught.value.param) == (400, "x-deadline-ms")


def test_the_name_of_a_session_has_a_limit() -> None:
    with pytest.raises(ApiError) as caught:
        read_scheduling_parameters({b"x-session-id": b"s" * (MAX_SESSION_BYTES + 1)}, None, None, 0.0)
    assert caught.value.param == "x-session-id"


@pytest.mark.parametrize(
    ("given", "is_"), [(b"1", True), (b" Yes", True), (b"on", True), (b"0", False), (b"OFF", False)]
)
def test_explanation_is_yes_or_no(given: bytes, is_: bool) -> None:
    assert read_scheduling_parameters({b"x-corewright-explain": given}, None, None, 0.0).explains is is_


@pytest.mark.parametrize("given", [b"", b"2", b"P(<7*h", b"\xff"])
def test_other_values_are_rejected(given: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        read_scheduling_parameters({b"x-corewright-explain": given}, None, None, 0.0)
    assert (caught.value.status, caught.value.param) == (400, "x-corewright-explain")
