"""What the classes compute of a configuration. Most keys are not read: the graphs have one value of each."""

from __future__ import annotations

import copy
import json
from importlib import metadata
from pathlib import Path
from typing import Any

GRAPHS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    "mistral": {"hidden_act": "silu"},
    "mixtral": {"hidden_act": "silu"},
    "gpt2": {
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    },
    "bloom": {"apply_residual_connection_post_layernorm": False},
    "gpt_neox": {"hidden_act": "gelu_new"},
}
"""What each family's graphs compute, whatever the configuration says."""

THETA = {"llama": 10000.0, "code_llama": 10000.0, "mistral": 10000.0, "mixtral": 1e6}
OPT_ACTIVATIONS = ("relu", "gelu_new", "silu")


def legacy() -> bool:
    """Whether transformers is one before 5, whose configurations have ``rope_theta`` and ``rotary_pct``.

    By its metadata: those beside this package name an old one, and ``tests.doubles.beside_transformers`` another.
    """
    return int(metadata.version("transformers").split(".")[0]) < 5


def as_computed(config: Any, path: str) -> Any:
    """A copy of ``config`` that says what the package computes of the checkpoint in ``path``.

    Raises what the package raises while it reads the configuration or builds the graphs.
    """
    computed, family = copy.deepcopy(config), config.model_type
    for name, value in GRAPHS.get(family.removeprefix("code_"), {}).items():
        setattr(computed, name, value)
    if family == "opt" and config.activation_function not in OPT_ACTIVATIONS:
        raise AssertionError(f"{config.activation_function} is not defined in activations.py")
    if family in THETA:
        width = config.hidden_size // config.num_attention_heads
        assert getattr(config, "head_dim", None) in (None, width), "unmatched batch_sizes"
        _set_rope(computed, _rope(config, path))
    elif family == "gpt_neox":
        settings = _settings(path)
        rope = {"rope_type": "default", "rope_theta": float(settings.get("rotary_emb_base", 10000))}
        _set_rope(computed, rope | {"partial_rotary_factor": settings.get("rotary_pct", 0.25)})
    return computed


def check_rotary(config: Any) -> None:
    """GPT-NeoX reads ``rotary_pct`` in its constructor, which transformers 5 does not have."""
    if not legacy():
        raise AttributeError(f"{type(config).__name__!r} object has no attribute 'rotary_pct'")


def _rope(config: Any, path: str) -> dict[str, Any]:
    """Transformers before 5 ignores ``rope_parameters`` of config.json; 5 keeps ``rope_theta`` from the package."""
    default, settings = THETA[config.model_type], _settings(path)
    theta = float(settings.get("rope_theta", default)) if legacy() else default
    scaling = (settings.get("rope_scaling") if legacy() else getattr(config, "rope_scaling", None)) or {}
    kind = scaling.get("rope_type", scaling.get("type")) if config.model_type.endswith("llama") else None
    return {**(scaling if kind == "llama3" else {"rope_type": "default"}), "rope_theta": theta}


def _set_rope(config: Any, rope: dict[str, Any]) -> None:
    if hasattr(config, "rope_parameters"):
        config.rope_parameters = rope
    else:
        config.rope_theta = rope["rope_theta"]


def _settings(path: str) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((Path(path) / "config.json").read_text())
    return settings
