"""The known failures on Neuron devices, from known_failures.csv: a row for each failure that others have reported.

The columns from ``engines`` to ``versions`` are its conditions, as lists with spaces; an empty one matches everything.
``text`` is a regular expression of what the compiler or the runtime prints, from which `workers.host.neuron_faults`
recognizes it. ``source`` names issues as owner/repository#number, and documents as owner/repository:path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from placements.facts.tables import read_table
from placements.facts.versions import order

KNOWN_FAILURE = "known-failure"
"""The id of the problem and of the failure that a row describes."""

Confidence = Literal["maintainer", "reproduced", "one report"]


@dataclass(frozen=True)
class KnownFailure:
    """A failure that others have reported, and its conditions."""

    id: str
    engines: str  # "any": no model is needed; "": nothing is known but its text
    machines: str  # families or types of instances: "inf2 trn1.2xlarge"
    families: str  # values of model_type
    parameters: str  # range of the model's size in 10^9: "7-9"
    degrees: str  # values of tp_degree
    option: str  # an entry of engine_options that is set
    prefill: str  # the least tokens of the longest prompt bucket
    versions: str  # "neuronx-cc>=2.23 neuronx-cc<2.24"; the compiler's series decides the SDK
    text: str
    reaction: Literal["stop", "retry"]
    what: str
    helps: str
    source: str
    date: str  # of the report
    confidence: Confidence
    severity: Literal["warning", "error"]  # error: a maintainer reports that it never works

    @property
    def packages(self) -> tuple[str, ...]:
        """The distributions whose versions matter."""
        return tuple(dict.fromkeys(re.split(">=|<", requirement)[0] for requirement in self.versions.split()))

    def is_in(self, versions: Mapping[str, str]) -> bool:
        """Returns whether installed distributions are of the versions; False if one that matters is unknown."""
        for requirement in self.versions.split():
            name, comparison, limit = re.split("(>=|<)", requirement)
            if name not in versions or (order(versions[name]) >= order(limit)) != (comparison == ">="):
                return False
        return True


KNOWN_FAILURES: tuple[KnownFailure, ...] = tuple(KnownFailure(**row) for row in read_table("facts/known_failures.csv"))


def failures_of(
    engine: str | None,
    instance: str,
    versions: Mapping[str, str],
    *,
    family: str | None = None,
    parameters: int | None = None,
    tp_degree: int = 1,
    options: Mapping[str, object] | None = None,
    prefill: int = 0,
) -> tuple[KnownFailure, ...]:
    """Returns the known failures of a model on an instance type with installed distributions.

    ``engine`` None: only failures that need no model. ``versions``: distribution -> version, as in
    `neuron_releases.Sdk.packages`. ``family`` and ``parameters`` None: unknown, so that rows that need them do not
    match. ``options`` are ``engine_options``; ``prefill`` is the longest prompt bucket in tokens.
    """
    size = None if parameters is None else parameters / 1e9
    return tuple(
        row
        for row in KNOWN_FAILURES
        if (row.engines == "any" if engine is None else engine in row.engines.split())
        and (not row.machines or any(map(instance.startswith, row.machines.split())))
        and (not row.families or family in row.families.split())
        and (not row.parameters or (size is not None and _within(size, row.parameters)))
        and (not row.degrees or str(tp_degree) in row.degrees.split())
        and (not row.option or bool((options or {}).get(row.option)))
        and prefill >= int(row.prefill or 0)
        and row.is_in(versions)
    )


def _within(size: float, limits: str) -> bool:
    least, _, most = limits.partition("-")
    return float(least) <= size <= float(most)
