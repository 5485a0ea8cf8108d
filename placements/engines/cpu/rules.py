"""The rules of the engine ``cpu``."""

from __future__ import annotations

from collections.abc import Iterator

from placements.rules.case import Case, EngineRules
from placements.rules.unused_settings import unused
from placements.spec.problems import Problem


def encoders_have_no_options(case: Case) -> Iterator[Problem]:
    """Drafts and the engine's options are of models that generate."""
    if case.model.kind != "generate":
        yield from unused(case, f" on kind {case.model.kind}", "draft", "engine_options")


RULES = EngineRules(rules=(encoders_have_no_options,))
