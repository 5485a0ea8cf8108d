"""The question that advice answers, and the candidates that are compared: specs of one model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from placements.facts.checkpoints import Checkpoint
from placements.facts.engines import Engine
from placements.facts.topology import DEGREES, TOPOLOGIES
from placements.resources.calibration import MeasuredSpeed
from placements.spec.notation import name_from

BATCHES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class SizingQuestion:
    """A model and its load. Lengths are in tokens, prices in dollars an hour by instance type."""

    source: str
    engine: Engine = "auto"
    instances: tuple[str, ...] = tuple(TOPOLOGIES)
    prompt_tokens: int = 512
    output_tokens: int = 128
    max_len: int | None = None  # None: ``slot``
    rps: float | None = None  # requests/s; None: a share of what a host can serve
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    prices: Mapping[str, float] = field(default_factory=dict)
    measured: tuple[MeasuredSpeed, ...] = ()
    degrees: tuple[int, ...] = ()  # those to compare; none: all documented ones
    batches: tuple[int, ...] = ()  # the values of ``max_batch`` to compare; none: BATCHES
    as_is: bool = False  # only weights in the checkpoint's own types, and degrees that divide its heads

    @property
    def name(self) -> str:
        """The model's name in the specs."""
        return name_from(self.source)

    @property
    def slot(self) -> int:
        """The tokens of a slot: ``max_len``, or the least power of two that holds a prompt and its output."""
        return self.max_len or 1 << (self.prompt_tokens + self.output_tokens - 1).bit_length()


@dataclass(frozen=True)
class SizingCandidate:
    """A way to serve the model."""

    question: SizingQuestion
    instance: str
    tp_degree: int
    max_batch: int
    quantized: bool  # weights in int8
    padded: bool  # the degree does not divide the heads

    @property
    def shape(self) -> tuple[object, ...]:
        """What decides the speed of a replica: equal on all instance types of a family."""
        return TOPOLOGIES[self.instance].family, self.tp_degree, self.max_batch, self.quantized

    @property
    def weights(self) -> str:
        """The type of the weights."""
        return "int8" if self.quantized else "bf16"

    def spec(self, replicas: int, hosts: int) -> str:
        """Returns the text of the spec with so many replicas on so many hosts."""
        question = self.question
        limits = {"ttft_ms": question.ttft_ms, "tpot_ms": question.tpot_ms}
        objectives = {name: int(limit) if limit == int(limit) else limit for name, limit in limits.items() if limit}
        fields: dict[str, Any] = {
            "source": question.source,
            "engine": None if question.engine == "auto" else question.engine,
            "tp_degree": self.tp_degree,
            "allow_head_padding": True if self.padded else None,
            "max_batch": self.max_batch,
            "max_len": question.slot,
            "quantize": "int8" if self.quantized else None,
            "replicas": replicas,
            "objectives": objectives or None,
        }
        shown = {name: value for name, value in fields.items() if value is not None}
        host = {"instance": self.instance, **({"count": hosts} if hosts > 1 else {})}
        return yaml.safe_dump(
            {"version": 1, "hosts": host, "models": {question.name: shown}}, sort_keys=False, width=1000
        )


def candidates(question: SizingQuestion, checkpoint: Checkpoint) -> Iterator[SizingCandidate]:
    """Yields every combination of instance type, degree, type of weights and batch, small batches first."""
    for instance in question.instances:
        topology = TOPOLOGIES[instance]
        for tp in DEGREES[topology.family]:
            padded = checkpoint.heads % tp != 0
            if tp > topology.cores or (padded and question.as_is) or (question.degrees and tp not in question.degrees):
                continue
            for quantized in (False,) if question.as_is else (False, True):
                for batch in question.batches or BATCHES:
                    yield SizingCandidate(question, instance, tp, batch, quantized, padded)
