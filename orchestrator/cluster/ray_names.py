"""The names, labels and resources under which Ray knows a fleet and its machines.

A fleet may share its Ray cluster with other fleets and other users.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from typing import Any

from placements.facts.topology import Topology

HOST_ACTOR = "host/"  # begins the name of each host actor; the label of its Ray node follows
SHARED = "corewright"  # the namespace in Ray's KV of what the fleets of a cluster must agree on


def ray_name(fleet: str) -> str:
    """Returns the name of the fleet's Ray namespace, of its namespace in Ray's KV and of its Serve application."""
    return f"corewright-{fleet}"


INSTANCE_LABEL = "corewright-instance"  # of a Ray node: the instance type of its machine
CORE_RESOURCE = re.compile("nc[0-9]+")


def core_resources(cores: int) -> dict[str, float]:
    """Returns a node's custom resources: one per NeuronCore, so that Ray itself rejects a second actor on a core.

    Ray's own `neuron_cores` is not used: it is not contiguous, and it rewrites NEURON_RT_VISIBLE_CORES.
    """
    return {f"nc{core}": 1 for core in range(cores)}


@dataclass(frozen=True)
class NodeDeclaration:
    """The labels and resources of the Ray node of a machine."""

    topology: Topology

    @property
    def labels(self) -> str:
        """The value of `ray start --labels`."""
        return f"{INSTANCE_LABEL}={self.topology.instance}"

    @property
    def resources(self) -> str:
        """The value of `ray start --resources`."""
        return json.dumps(core_resources(self.topology.cores), separators=(",", ":"))

    @property
    def arguments(self) -> str:
        """The options of `ray start`, quoted for a shell."""
        return f"--labels={shlex.quote(self.labels)} --resources={shlex.quote(self.resources)}"

    @property
    def environment(self) -> str:
        """The two values as the lines of an environment file of systemd, or of a shell's script."""
        return f"NODE_LABELS={shlex.quote(self.labels)}\nNODE_RESOURCES={shlex.quote(self.resources)}"

    def as_dict(self) -> dict[str, Any]:
        """Returns the declaration for JSON."""
        labels = {INSTANCE_LABEL: self.topology.instance}
        return {"labels": labels, "resources": core_resources(self.topology.cores)}
