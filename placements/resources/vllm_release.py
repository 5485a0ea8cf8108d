"""The release of vllm-neuron that the plan counts with."""

from __future__ import annotations

from placements.facts.topology import Host
from placements.facts.vllm import VllmNeuron, release_for
from placements.spec.schema import Spec


def release_on(spec: Spec, host: Host) -> VllmNeuron | None:
    """Returns the release that the plan counts with on a host; None: vLLM runs on the CPU there."""
    settings = spec.engines.get("vllm")
    named = None if settings is None else settings.plugin
    return (
        None if host.topology is None or (host.emulated and named is None) else release_for(host.topology.family, named)
    )
