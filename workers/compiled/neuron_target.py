"""Detects the target of the Neuron compiler on this machine, on which compiled artifacts depend."""

from __future__ import annotations

import os
from dataclasses import dataclass

from placements.facts.topology import DEFAULT_LNC, LNC_FAMILIES, family_of
from workers.host import host_facts
from workers.messages.status import Failure

OVERRIDE = "NEURON_PLATFORM_TARGET_OVERRIDE"
LNC = ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE")  # the second is the older name


@dataclass(frozen=True)
class NeuronTarget:
    """A compile target. Code loads only on a machine where both fields match (AWS's page on logical NeuronCores)."""

    name: str | None  # the compiler's --target; None: the instance type is unknown
    lnc: int | str | None  # physical cores per logical core; a string if the variable is not a number


def current() -> NeuronTarget:
    """Returns the target by the environment, else by the instance type; an unknown type is its own target."""
    name = os.environ.get(OVERRIDE) or target_of(host_facts.instance_type() or "") or None
    lnc = next(filter(None, map(os.environ.get, LNC)), None)
    if lnc is None:
        return NeuronTarget(name, DEFAULT_LNC if name in LNC_FAMILIES else 1 if name == "trn1" else None)
    return NeuronTarget(name, int(lnc) if lnc.isdecimal() else lnc)


def target_of(instance: str) -> str:
    """Returns the compiler's target for an instance type or a family; "" for ""."""
    family = family_of(instance)
    return "trn1" if family == "inf2" else family


def refusal(override: str, instance: str) -> Failure | None:
    """Returns why the value of `OVERRIDE` on a host is wrong for its instance type; None: it is unset or correct."""
    target = target_of(instance)
    if not override or target_of(override) == target:
        return None
    fact = f"{OVERRIDE} is {override} in the environment of the host, but {instance} runs code for {target}"
    return Failure("target-differs", fact, f"unset it where `up` or Ray is started, or set it to {target}")
