"""The model families of transformers-neuronx."""

from __future__ import annotations

from placements.facts.tnx_families import FAMILIES, REFUSED, Family
from workers.messages.engine_protocol import EngineLoadError


def family_of(model_type: object, where: object) -> Family:
    """Returns the family of ``model_type``, which the file ``where`` names. Raises EngineLoadError."""
    if isinstance(model_type, str) and model_type in REFUSED:
        message = f"transformers-neuronx does not support the model_type {model_type} of {where}: {REFUSED[model_type]}"
        raise EngineLoadError("unknown-family", message, "use the cpu engine, or another model")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise EngineLoadError(
            "unknown-family",
            f"transformers-neuronx has no class for the model_type {model_type!r} of {where}",
            f"supported: {', '.join(FAMILIES)}",
        )
    return FAMILIES[model_type]
