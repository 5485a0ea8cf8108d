"""Where cores may lie, written down once more for the yardsticks: no code or table of the planner is used here.

Sources: AWS Neuron SDK docs, about-neuron/arch/neuron-hardware (cores and memory of the machines);
deploy/infrastructure/scheduler.rst (trn1: aligned device sets only); collective-communication.rst of SDK 2.21 (inf2:
consecutive devices); generative-llm-inference-with-neuron.rst (inf2: 12 as well, taken for half of the ring).
"""

from __future__ import annotations

from functools import cache

FAMILY = {
    "inf2.xlarge": "inf2",
    "inf2.8xlarge": "inf2",
    "inf2.24xlarge": "inf2",
    "inf2.48xlarge": "inf2",
    "trn1.2xlarge": "trn1",
    "trn1.32xlarge": "trn1",
    "trn1n.32xlarge": "trn1",
    "trn2.48xlarge": "trn2",
    "trn2u.48xlarge": "trn2",
}

CORES = {
    "inf2.xlarge": 2,
    "inf2.8xlarge": 2,
    "inf2.24xlarge": 12,
    "inf2.48xlarge": 24,
    "trn1.2xlarge": 2,
    "trn1.32xlarge": 32,
    "trn1n.32xlarge": 32,
    "trn2.48xlarge": 64,
    "trn2u.48xlarge": 64,
}
"""NeuronCores as NEURON_RT_VISIBLE_CORES counts them; trn2 with two physical cores in a logical one."""

MEMORY_GIB = {
    "inf2.xlarge": 16,
    "inf2.8xlarge": 128,
    "inf2.24xlarge": 384,
    "inf2.48xlarge": 768,
    "trn1.2xlarge": 32,
    "trn1.32xlarge": 512,
    "trn1n.32xlarge": 512,
    "trn2.48xlarge": 2048,
    "trn2u.48xlarge": 2048,
}
"""Memory of the host, not of the devices."""

STEP = {
    "inf2": {1: 1, 2: 2, 4: 2, 8: 2, 12: 2, 16: 2, 24: 24},
    "trn1": {1: 1, 2: 2, 8: 8, 16: 16, 32: 32},
    "trn2": {1: 1, 2: 2, 4: 4, 8: 8, 16: 16, 32: 32, 64: 64},
}
"""Degrees of each family; a range of so many cores begins at a multiple of the number."""


@cache
def starts(instance: str, tp: int) -> tuple[int, ...]:
    """The cores at which a range of ``tp`` may begin, ascending; () where the family has no such degree."""
    step = STEP[FAMILY[instance]].get(tp)
    return () if step is None else tuple(range(0, CORES[instance] - tp + 1, step))
