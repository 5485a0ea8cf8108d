"""What is read of a checkpoint before its weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from workers.engine import EngineLoadError
from workers.engines.checkpoint_files import check_rotary

BASE = {"rope_type": "default", "rope_theta": 500_000.0}


@pytest.mark.parametrize(
    ("settings", "read", "ignored"),
    [
        ({"rope_parameters": BASE}, {"rope_theta": 10_000.0}, "rope_theta: 500000.0"),
        ({"rope_parameters": BASE}, {"rope_theta": 500_000.0}, ""),
        ({"rope_parameters": BASE}, {}, ""),  # transformers 5
        ({"rope_theta": 500_000.0}, {"rope_theta": 500_000.0}, ""),
        ({"rope_parameters": {"rope_type": "llama3"}}, {"rope_theta": 10_000.0, "rope_scaling": None}, "llama3"),
        ({"rope_parameters": {"rope_type": "llama3"}}, {"rope_theta": 10_000.0, "rope_scaling": BASE}, ""),
    ],
)
def test_rotary_parameters_that_transformers_ignores_are_refused(
    settings: dict[str, Any], read: dict[str, Any], ignored: str
) -> None:
    """Releases before 5 take their own base where config.json has only the names of 5."""
    if not ignored:
        check_rotary(settings, SimpleNamespace(**read))
        return
    with pytest.raises(EngineLoadError) as caught:
        check_rotary(settings, SimpleNamespace(**read))
    assert (caught.value.id, ignored in caught.value.what) == ("rotary-misread", True)
