"""Which options NxD Inference's NeuronConfig has in which version.

The package itself takes any name and only logs those that it does not know, so a misspelt or too new one would be
without effect.
"""

from __future__ import annotations

from placements.options import owned
from placements.options.tables import TABLES

CONFIG = "neuronx_distributed_inference.NeuronConfig"
OPTIONS = TABLES[CONFIG]
MOE_OPTIONS = frozenset(TABLES["neuronx_distributed_inference.MoENeuronConfig"])  # beside those, of models of experts
FIELDS = owned.FIELDS[CONFIG]  # options that fields of the spec set, and which
UNSERVED = owned.UNSERVED[CONFIG]  # options that change how the model is called, or what it answers: why they stay off

Release = tuple[int, int]
RELEASES: tuple[Release, ...] = ((0, 1), (0, 2), (0, 4), (0, 7), (0, 8), (0, 9))  # those whose options are known


def release_of(version: str) -> Release:
    """The known release that a version of the package has the options of: "0.8.16251+f3ca" is (0, 8).

    One between two known releases has those of the earlier one; what is newer than all has those of the newest.
    """
    numbers = [int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit()]
    found = (numbers[0], numbers[1]) if len(numbers) == 2 else RELEASES[-1]
    return max((release for release in RELEASES if release <= found), default=RELEASES[0])


def lacks(option: str, release: Release) -> str | None:
    """Why NeuronConfig of ``release`` has no such option; None where it has it."""
    known = OPTIONS.get(option)
    if known is None:
        return "no version has it"
    if known.first and release_of(known.first) > release:
        return f"versions from {known.first} on have it"
    if known.last and release_of(known.last) < release:
        return f"versions up to {known.last} have it"
    return None
