"""What the classes of transformers-neuronx can do, by config.json's model_type."""

from __future__ import annotations

from dataclasses import dataclass

from workers.engine import EngineLoadError


@dataclass(frozen=True)
class Family:
    """One class of the package, and where its constructor and its ``forward`` differ from the others."""

    continuous: bool = False  # defines ``context_batch_sizes``: prompts join a running batch, each row at its position
    speculates: bool = False  # defines ``speculative_forward``
    serial: bool = False  # GPT-J and GPT-NeoX: no context graphs, one token a step, no NEFF files, no quantization
    broadcasts: bool = False  # has ``prompt_batch_size``, which is 1 unless told, and then one prompt fills all rows
    resets: bool = False  # ``reset()`` takes nothing; GPT-2's wants the length of a context graph


# The package's own registry, `modeling_auto.NEURON_MODEL_FOR_CAUSAL_LM_MAPPING`, has these and no more.
FAMILIES = {
    "bloom": Family(resets=True),
    "code_llama": Family(continuous=True, speculates=True, resets=True),
    "gpt2": Family(speculates=True, broadcasts=True),
    "gpt_neox": Family(serial=True, resets=True),
    "gptj": Family(serial=True, resets=True),
    "llama": Family(continuous=True, speculates=True, resets=True),
    "mistral": Family(continuous=True, resets=True),
    "mixtral": Family(continuous=True, resets=True),
    "opt": Family(resets=True),
}


def family_of(model_type: object, where: object) -> Family:
    """The family of ``model_type``. ``where`` is the file that names it. Raises EngineLoadError."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise EngineLoadError(
            "unknown-family",
            f"transformers-neuronx has no class for the model_type {model_type!r} of {where}",
            f"it has {', '.join(FAMILIES)}",
        )
    return FAMILIES[model_type]
