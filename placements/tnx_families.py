"""What the classes of transformers-neuronx can do, by config.json's model_type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Family:
    """One class of the package, and where its constructor and its ``forward`` differ from the others."""

    continuous: bool = False  # defines ``context_batch_sizes``: prompts join a running batch, each row at its position
    speculates: bool = False  # defines ``speculative_forward``; as the model and as its draft (the developer guide)
    samples: bool = True  # on the device: the developer guide leaves Mixtral out; serial classes have no such option
    serial: bool = False  # derives from no ``NeuronModelBase``: no context graphs, no padded heads (``shard_along``
    # raises ValueError), no quantization, no NEFF files; one token a step
    broadcasts: bool = False  # has ``prompt_batch_size``, which is 1 unless told, and then one prompt fills all rows
    resets: bool = False  # ``reset()`` takes nothing; GPT-2's wants the length of a context graph


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "bloom": Family(resets=True),
        "code_llama": Family(continuous=True, speculates=True, resets=True),
        "gpt2": Family(speculates=True, broadcasts=True),
        "gpt_neox": Family(samples=False, serial=True, resets=True),
        "gptj": Family(samples=False, serial=True, resets=True),
        "llama": Family(continuous=True, speculates=True, resets=True),
        "mistral": Family(continuous=True, resets=True),
        "mixtral": Family(continuous=True, samples=False, resets=True),
        "opt": Family(resets=True),
    }
)
"""transformers-neuronx ``modeling_auto.NEURON_MODEL_FOR_CAUSAL_LM_MAPPING`` has these and no more: no gpt_bigcode,
though the LMI page lists it."""
