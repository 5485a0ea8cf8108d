"""Parts of the manifests of several engines: versions of distributions, and what the Neuron compiler depends on."""

from __future__ import annotations

import os
from importlib import metadata
from typing import Any

from workers.neff_cache import neuron_target

# Environment variables that the compiler (NxD Inference: through ``with_flags``) and torch-xla read.
READ = ("NEURON_CC_FLAGS", "XLA_HANDLE_SPECIAL_SCALAR", "UNSAFE_FP8FNCAST")


def version_of(distribution: str) -> str:
    """Returns the version of an installed distribution; empty where there is none by that name."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def neuron_build() -> dict[str, Any]:
    """Returns the environment and the target of the Neuron compiler on this machine."""
    target = neuron_target.current()
    return {
        "environment": {name: os.environ[name] for name in READ if os.environ.get(name)},
        "target": target.name,
        "lnc": target.lnc,
    }
