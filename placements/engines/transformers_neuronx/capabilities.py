"""What the engine ``transformers-neuronx`` can do: by the class of a model_type, and its reading of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from placements.engines.capabilities import NEURON_INDEX, Capabilities
from placements.facts.topology import LNC_FAMILIES


@dataclass(frozen=True)
class Family:
    """The capabilities of one class of the package."""

    continuous: bool = False  # defines ``context_batch_sizes``: prompts join a running batch, each row at its position
    speculates: bool = False  # defines ``speculative_forward``; as the model and as its draft (the developer guide)
    samples: bool = True  # on the device: the developer guide omits Mixtral; serial classes have no such option
    serial: bool = False  # derives from no ``NeuronModelBase``: no context graphs, no padded heads (``shard_along``
    # raises ValueError), no quantization, no NEFF files; one token per step
    quantizes: bool = True  # the matrices; the graphs of Mixtral's experts do not build with scales
    quantizes_kv: bool = False  # converts on writes to and reads from the KV cache; the graphs of other classes do not
    # build with a KV cache of another dtype
    broadcasts: bool = False  # has ``prompt_batch_size`` with default 1, where one prompt fills all rows
    resets: bool = (
        False  # ``reset()`` has no parameters; GPT-2's requires a context length, and loading weights resets it
    )


FAMILIES: Mapping[str, Family] = {
    "bloom": Family(resets=True),
    "code_llama": Family(continuous=True, speculates=True, quantizes_kv=True, resets=True),
    "gpt2": Family(speculates=True, broadcasts=True),
    "gpt_neox": Family(samples=False, serial=True, quantizes=False, resets=True),
    "llama": Family(continuous=True, speculates=True, quantizes_kv=True, resets=True),
    "mistral": Family(continuous=True, quantizes_kv=True, resets=True),
    "mixtral": Family(continuous=True, samples=False, quantizes=False, quantizes_kv=True, resets=True),
    "opt": Family(resets=True),
}
"""The families of transformers-neuronx ``modeling_auto.NEURON_MODEL_FOR_CAUSAL_LM_MAPPING`` with correct results. The
mapping lacks gpt_bigcode, though the LMI page lists it."""

REFUSED: Mapping[str, str] = {
    "gptj": "its class attends only to position 0 after the first token, and ignores padding in a batch"
}
"""model_type -> why the package's class is not used. GPT-J: ``hlo.decoder_attention_mask_legacy`` compares the row of a
one-token step, 0, with the positions, from December 2023 to 0.13. Prompts are processed token by token too."""


def run_length(tokens: int, slots: int) -> int:
    """Returns the row length of a graph that verifies up to ``tokens`` in a continuous batch: at least ``slots``.

    The package truncates ``last_token_id``, which has one entry for each slot, to the row length
    (``layers.transformer.inputs``), and fails with shorter rows. The rest of a row is padding.
    """
    return max(tokens, slots)


_TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")  # three names of one function
_COMPUTED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "bloom": {"apply_residual_connection_post_layernorm": (False,)},
    "gpt2": {
        "activation_function": (*_TANH, "gelu"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
    },
    "gpt_neox": {
        "hidden_act": ("gelu", *_TANH),
        "use_parallel_residual": (True,),
        "attention_bias": (True,),
    },
    "llama": {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
    "mistral": {"hidden_act": ("silu",)},
    "mixtral": {"hidden_act": ("silu",)},
    "opt": {
        "activation_function": ("relu", "gelu_new", "silu"),
        "do_layer_norm_before": (True,),
        "enable_bias": (True,),
        "layer_norm_elementwise_affine": (True,),
    },
}
"""Family -> key of config.json -> the values that the graphs support. Others fail in ``to_neuron`` or, more often, are
ignored silently. The default of an absent key in transformers is one of these values."""

_THETA = {"llama": 10_000.0, "mistral": 10_000.0, "mixtral": 1_000_000.0}
"""The package's default of ``rope_theta``, the same as that of transformers."""


def lacks(config: Mapping[str, Any]) -> str:
    """Returns the setting of a decoded config.json that the class of its family does not support, else ""."""
    family = _family(config)
    for name, values in _COMPUTED.get(family, {}).items():
        value = config.get(name)
        if value is not None and value not in values:
            return f"{name}: {str(value).lower() if isinstance(value, bool) else value}"
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        return ""
    width, even = config.get("head_dim"), hidden // heads
    if family in _THETA and width is not None and width != even:
        return f"head_dim: {width}, not hidden_size / num_attention_heads ({even})"
    embedded = config.get("word_embed_proj_dim")
    if family == "opt" and embedded is not None and embedded != hidden:
        return f"word_embed_proj_dim: {embedded}, which is not the hidden_size"
    return ""


def approximates(config: Mapping[str, Any]) -> str:
    """Returns the activation that the package computes by its tanh approximation, else ""."""
    family = _family(config)
    if family == "gpt_neox":
        return "gelu" if config.get("hidden_act") in (None, "gelu") else ""  # gelu is the default of transformers
    return "gelu" if family == "gpt2" and config.get("activation_function") == "gelu" else ""


_HIDES_ROPE = 5
"""The major version of transformers from which a configuration has only ``rope_parameters``."""

MISREAD_HINT = "transformers below 5 in the engine's Python; rope_theta and rope_scaling at the top of config.json"
"""The hint for ``misreads``."""


def misreads(config: Mapping[str, Any], major: int) -> str:
    """Returns how the package misreads the rotary positions of a decoded config.json, or "" if it reads them correctly.

    ``major`` is the major version of the installed transformers. Transformers 5 hides ``rope_theta`` and GPT-NeoX's
    ``rotary_pct`` from the package; earlier versions ignore ``rope_parameters``, the format of version 5.
    """
    family, hides = _family(config), major >= _HIDES_ROPE
    written = config.get("rope_parameters")
    new = written if isinstance(written, Mapping) else {}
    if family == "gpt_neox":
        if hides:
            return f"transformers {major} has no rotary_pct, which the package needs"
        pairs = ("partial_rotary_factor", "rotary_pct", 0.25), ("rope_theta", "rotary_emb_base", 10_000)
        for name, legacy, absent in pairs:
            if config.get(legacy) is None and new.get(name, absent) != absent:
                return f"{name}: {new[name]} is only in rope_parameters, which transformers {major} ignores"
        return ""
    if family not in _THETA:
        return ""
    usual, older = _THETA[family], config.get("rope_theta")
    theta, kind = older or new.get("rope_theta") or usual, new.get("rope_type", "default")
    if hides:
        return f"transformers {major} hides rope_theta: {theta} from the package" if theta != usual else ""
    alone = f"rope_theta: {theta}" if older is None and theta != usual else ""
    if not alone and kind != "default" and config.get("rope_scaling") is None:
        alone = f"rope_type: {kind}"
    return f"{alone} is only in rope_parameters, which transformers {major} ignores" if alone else ""


@dataclass(frozen=True)
class Reading:
    """How the package deviates from a checkpoint's config.json; all empty if it does not."""

    lacks: str = ""  # see the functions of the same names
    approximates: str = ""
    misreads: tuple[str, str] = ("", "")  # with transformers 4, and with 5 or newer

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Reading:
        """Reads a decoded config.json."""
        return cls(lacks(config), approximates(config), (misreads(config, 4), misreads(config, _HIDES_ROPE)))

    def misread(self, transformers: str | None) -> str:
        """Returns what is misread with that version; if it is unknown, only what every version misreads."""
        older, newer = self.misreads
        first = (transformers or "").split(".")[0]
        if not first.isdecimal():
            return older if older and newer else ""
        return newer if int(first) >= _HIDES_ROPE else older


def _family(config: Mapping[str, Any]) -> str:
    family = config.get("model_type")
    return family.removeprefix("code_") if isinstance(family, str) else ""


class TnxCapabilities(Capabilities):
    """What transformers-neuronx can do."""

    def step_widths(self, draft_k: int | None) -> tuple[int, ...]:
        """One token; it verifies drafts with graphs of their own."""
        return (1,)

    def misread(self, config: Mapping[str, Any], transformers: str | None) -> str:
        """The rotary positions."""
        return Reading.of(config).misread(transformers)

    def hides_settings(self, packages: Mapping[str, str]) -> bool:
        """A newer transformers hides ``rope_theta``."""
        first = packages.get("transformers", "").split(".")[0]
        return self.requires[0] in packages and first.isdecimal() and int(first) >= _HIDES_ROPE


CAPABILITIES = TnxCapabilities(
    engine="transformers-neuronx",
    runs_on="neuron",
    package="transformers_neuronx",
    requires=("transformers-neuronx",),
    loads=("hf", "split", "optimum-first"),
    uses_neuron_cache=True,
    install=(
        f"AWS's images of Neuron SDK 2.25 and before have it; else pip install transformers-neuronx {NEURON_INDEX}"
    ),
    families=tuple(FAMILIES),
    refused=MappingProxyType(REFUSED),
    ropes=MappingProxyType({"llama": MappingProxyType({"llama3": ""})}),
    quantize=("int8", "fp8"),
    quantize_kv=("fp8",),
    drafts=("draft_model",),
    scores_prompts=True,
    shares_heads=True,
    unquantized=MappingProxyType(
        {name: "its graphs have no scales" for name, family in FAMILIES.items() if not family.quantizes}
    ),
    not_on=LNC_FAMILIES,
)
"""The last SDK with it does not compile for families with logical cores. ``ropes``: ``llama/config.py`` raises
ValueError for other types, and the other classes ignore ``rope_scaling``."""
