"""The family of a checkpoint, of those that transformers-neuronx has."""

from __future__ import annotations

from placements.facts.tnx_families import FAMILIES, REFUSED, Family
from workers.messages.engine_protocol import EngineLoadError


def family_of(model_type: object, where: object) -> Family:
    """The family of ``model_type``. ``where`` is the file that names it. Raises EngineLoadError."""
    if isinstance(model_type, str) and model_type in REFUSED:
        what = f"transformers-neuronx serves no {model_type}, which {where} names: {REFUSED[model_type]}"
        raise EngineLoadError("unknown-family", what, "take the cpu engine, or another model")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise EngineLoadError(
            "unknown-family",
            f"transformers-neuronx has no class for the model_type {model_type!r} of {where}",
            f"it has {', '.join(FAMILIES)}",
        )
    return FAMILIES[model_type]
