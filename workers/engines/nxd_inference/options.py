"""The options of NxD Inference's NeuronConfig by version.

The package itself accepts any name and only logs unknown ones, so a misspelt or too new option would have no effect.
"""

from __future__ import annotations

from placements.facts.engines import Release, nxd_release
from placements.rules.options import tables

CONFIG = "neuronx_distributed_inference.NeuronConfig"
OPTIONS = tables.TABLES[CONFIG]
MOE_OPTIONS = frozenset(
    tables.TABLES["neuronx_distributed_inference.MoENeuronConfig"]
)  # in addition, for models of experts
FIELDS = tables.FIELDS[CONFIG]  # options that are set by fields of the spec
UNSERVED = tables.UNSERVED[CONFIG]  # options that change the model's interface or answers -> why they are unsupported


def lacks(option: str, release: Release) -> str | None:
    """Returns why NeuronConfig of ``release`` lacks the option; None where it has it."""
    entry = OPTIONS.get(option)
    if entry is None:
        return "no version has it"
    if entry.first and nxd_release(entry.first) > release:
        return f"versions from {entry.first} on have it"
    return None
