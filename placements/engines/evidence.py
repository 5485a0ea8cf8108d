"""What others report for a model on an engine, a release of the Neuron SDK and a machine. Pure.

Reports of served and compiled models are in facts/reports.csv, and failures in `known_failures`. None of them was run
with corewright. Columns of the table: ``billions`` is the number of parameters in 10^9; ``rope`` is the type of scaled
rotary positions; ``ran`` is what was run, and ``engines`` compile the model with the same code; ``sdk`` is the series
of the release. If a report does not state the type of machine, ``instance`` is a family; ``tp_degree`` may be empty.
``confidence`` and ``source`` are as in `known_failures`; "reproduced" means several reports, or one with details.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from placements.engines.registry import AUTO_ENGINES, ENGINES, Engine, sdks_with
from placements.facts.checkpoints import Checkpoint
from placements.facts.known_failures import Confidence, KnownFailure, failures_of
from placements.facts.neuron_releases import SDKS, Sdk
from placements.facts.tables import read_table
from placements.facts.topology import family_of
from placements.facts.versions import order

Seen = Literal["served", "compiled"]
EvidenceStatus = Literal["served", "compiled", "failed", "support ended", "not reported"]

MAX_SIZE_DIFFERENCE = 0.05  # in parameters, of models of one shape, such as with a longer vocabulary
SERVED_WITH: Engine = AUTO_ENGINES[0]  # of the models that are recommended
_WEIGHTS: Mapping[str, int] = {name: weight for weight, name in enumerate(reversed(get_args(Confidence)), 1)}
THIN = "Reports are few, and none is about corewright."


class ModelVariant(NamedTuple):
    """The properties of a model by which reports apply to it."""

    family: str  # model_type
    parameters: int | None = None  # None: unknown
    rope: str = ""  # the type of scaled rotary positions; "": none

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ModelVariant:
        """Returns the variant of a checkpoint."""
        kind = checkpoint.rope_type
        return cls(checkpoint.model_type, checkpoint.parameters, "" if kind == "default" else kind)


@dataclass(frozen=True)
class ModelReport:
    """A model that was compiled or served, a row of the table."""

    model: str  # hub id
    family: str
    billions: str
    rope: str
    engines: str
    ran: str
    sdk: str
    instance: str
    tp_degree: str
    seen: Seen
    date: str
    confidence: Confidence
    source: str

    @property
    def variant(self) -> ModelVariant:
        """The model of the report."""
        return ModelVariant(self.family, round(float(self.billions) * 1e9), self.rope)

    def is_of(self, model: ModelVariant, engine: Engine, machines: str) -> bool:
        """Returns whether it is of a model of this shape on an engine and a family of machines."""
        is_alike = (self.family, self.rope, family_of(self.instance)) == (model.family, model.rope, machines)
        if not is_alike or engine not in self.engines.split() or model.parameters is None:
            return False
        return abs(model.parameters / (float(self.billions) * 1e9) - 1) <= MAX_SIZE_DIFFERENCE


REPORTS: tuple[ModelReport, ...] = tuple(ModelReport(**row) for row in read_table("facts/reports.csv"))


@dataclass(frozen=True)
class Evidence:
    """What is reported, and its sources."""

    status: EvidenceStatus
    sdk: str  # series
    sources: tuple[str, ...] = ()
    confidence: Confidence | None = None  # of the best source

    @classmethod
    def by(cls, status: EvidenceStatus, sdk: str, reports: Sequence[ModelReport | KnownFailure]) -> Evidence:
        """Returns evidence with the sources of reports, of which there is at least one."""
        best = max((report.confidence for report in reports), key=_WEIGHTS.__getitem__)
        return cls(status, sdk, tuple(report.source for report in reports), best)

    @property
    def weight(self) -> int:
        """A greater number for a better confidence; 0 without reports."""
        return _WEIGHTS.get(self.confidence or "", 0)

    @property
    def text(self) -> str:
        """The status, with its confidence and sources if there are any."""
        return f"{self.status} ({self.confidence}: {', '.join(self.sources)})" if self.sources else self.status


def evidence_of(model: ModelVariant, engine: Engine, sdk: Sdk, instance: str, tp_degree: int = 0) -> Evidence:
    """Returns what is reported for a model on an engine, a release, and an instance type or a family of them.

    1. Failed: a known failure applies, even if another model of this shape was served.
    2. Served, or else compiled: a report applies.
    3. Support ended: the release is later than the last one whose images have the engine for the machine.
    """
    machines, series = family_of(instance), sdk.series
    known = failures_of(
        engine, instance, sdk.packages, family=model.family, parameters=model.parameters, tp_degree=tp_degree
    )
    if known:  # 1
        return Evidence.by("failed", series, known)
    reports = [report for report in REPORTS if report.sdk == series and report.is_of(model, engine, machines)]
    for seen in get_args(Seen):  # 2
        if alike := [report for report in reports if report.seen == seen]:
            return Evidence.by(seen, series, alike)
    supported = sdks_with(engine, machines)
    ended = bool(supported) and order(sdk.sdk) > order(supported[-1].sdk)  # 3
    return Evidence("support ended" if ended else "not reported", series)


def releases_reported(model: ModelVariant, engine: Engine, machines: str) -> tuple[Evidence, ...]:
    """Returns the evidence on each series for which something is reported, newest first."""
    last = {sdk.series: sdk for sdk in sdks_with(engine, machines) or SDKS}
    each = [evidence_of(model, engine, sdk, machines) for sdk in reversed(last.values())]
    return tuple(evidence for evidence in each if evidence.sources)


def served_on(machines: str) -> tuple[ModelReport, ...]:
    """Returns the reports of models that were served on one release, the most reliable report first.

    It is the release with the most reliable reports. Only releases and families that SERVED_WITH supports on the
    machines count.
    """
    served: dict[str, dict[ModelVariant, ModelReport]] = {sdk.series: {} for sdk in sdks_with(SERVED_WITH, machines)}
    for report in sorted(REPORTS, key=lambda report: (-_WEIGHTS[report.confidence], -float(report.billions))):
        is_supported = SERVED_WITH in report.engines.split() and ENGINES[SERVED_WITH].serves(report.family, machines)
        is_here = family_of(report.instance) == machines and report.sdk in served
        if is_supported and is_here and report.seen == "served":
            served[report.sdk].setdefault(report.variant, report)
    weights = {sdk: sum(_WEIGHTS[each.confidence] for each in models.values()) for sdk, models in served.items()}
    best = max(weights, key=lambda sdk: (weights[sdk], order(sdk)), default=None)
    return () if best is None else tuple(served[best].values())
