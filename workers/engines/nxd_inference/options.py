"""Which options NxD Inference's NeuronConfig has in which version.

The package itself takes any name and only logs those that it does not know, so a misspelt or too new one would be
without effect.
"""

from __future__ import annotations

from placements.facts.engines import Release, nxd_release
from placements.rules.options import owned
from placements.rules.options.tables import TABLES

CONFIG = "neuronx_distributed_inference.NeuronConfig"
OPTIONS = TABLES[CONFIG]
MOE_OPTIONS = frozenset(TABLES["neuronx_distributed_inference.MoENeuronConfig"])  # beside those, of models of experts
FIELDS = owned.FIELDS[CONFIG]  # options that fields of the spec set, and which
UNSERVED = owned.UNSERVED[CONFIG]  # options that change how the model is called, or what it answers: why they stay off


def lacks(option: str, release: Release) -> str | None:
    """Why NeuronConfig of ``release`` has no such option; None where it has it."""
    known = OPTIONS.get(option)
    if known is None:
        return "no version has it"
    if known.first and nxd_release(known.first) > release:
        return f"versions from {known.first} on have it"
    if known.last and nxd_release(known.last) < release:
        return f"versions up to {known.last} have it"
    return None
