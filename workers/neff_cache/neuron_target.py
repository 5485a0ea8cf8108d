"""What the Neuron compiler compiles for on this machine: a part of what compiled artifacts depend on."""

from __future__ import annotations

import os
from dataclasses import dataclass

from workers.host import host_facts

OVERRIDE = "NEURON_PLATFORM_TARGET_OVERRIDE"
LNC = ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE")  # the second is the older name
TARGETS = {"inf2": "trn1", "trn1": "trn1", "trn1n": "trn1", "trn2": "trn2", "trn2u": "trn2"}  # optimum-neuron's table


@dataclass(frozen=True)
class NeuronTarget:
    """Code loads only where both are the same (AWS's page on logical NeuronCores)."""

    name: str | None  # of the compiler's --target; None where the machine does not tell its type
    lnc: int | str | None  # physical cores in a logical one; a text where the variable holds no number


def here() -> NeuronTarget:
    """By the environment, else by the instance type; a type that is not known is a target of its own."""
    family = (host_facts.instance_type() or "").partition(".")[0]
    name = os.environ.get(OVERRIDE) or TARGETS.get(family, family) or None
    told = next(filter(None, map(os.environ.get, LNC)), None)
    if told is None:
        return NeuronTarget(name, {"trn1": 1, "trn2": 2}.get(name or ""))
    return NeuronTarget(name, int(told) if told.isdecimal() else told)
