"""The machine that graphs are compiled for: that of ``neuron_double``."""

from neuron_double.machine import instance

SUPPORTED_TYPES = ["inf2", "trn1", "trn1n", "trn2", "trn3"]


def get_platform_target(compiler_flags: str | None = None) -> str:
    """Returns what NEFFs are compiled for; the versions before 0.6 know no other names."""
    return instance().target
