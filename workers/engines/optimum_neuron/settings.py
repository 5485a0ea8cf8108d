"""The settings of a model that Optimum Neuron's artifacts depend on, and what its classes do not compute.

Pure: the package is not imported, so that the planner, the compiling process and the loading one agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.engines.engine_setup import CheckpointSettings
from workers.messages.engine_protocol import EngineLoadError

MAX_TOP_K = 256  # ids that the device samples from: the default of NxDNeuronConfig's max_topk


class OptimumSettings(CheckpointSettings, frozen=True):
    """The part of a replica's configuration that the artifacts and their use depend on."""

    source: str
    dtype: str
    slots: int
    max_len: int
    tp_degree: int
    sampling: str
    engine_options: dict[str, Any]
    allow_pickle: bool

    @property
    def prefill_chunk_size(self) -> int | None:
        """Tokens of a prompt in one run; 0: a prompt is run as a whole; None: the package chooses."""
        return self.engine_options.get("prefill_chunk_size")


def check_computed(settings: OptimumSettings, config: Mapping[str, Any]) -> None:
    """Raises EngineLoadError for a config.json whose model the package would compute without a part of it.

    1. The biases of a llama's attention: ``NeuronLlamaDecoderLayer`` creates none, and its loader only warns of weights
       that are left over.
    2. Heads of a llama of another width than ``hidden_size / num_attention_heads``: its rotary embedding has that one.
    3. A sliding window: no class of 0.4 reads it. That of mistral, which only 0.0.28 serves, is computed.
    """
    family, path = str(config.get("model_type")), f"{settings.source}/config.json"
    hint = "use the engine cpu or nxd-inference, or another model"
    if family == "llama":
        if config.get("attention_bias"):  # 1
            raise EngineLoadError("unknown-family", f"Optimum Neuron ignores the attention_bias of {path}", hint)
        usual = int(config["hidden_size"]) // int(config["num_attention_heads"])
        if config.get("head_dim") not in (None, usual):  # 2
            what = f"Optimum Neuron ignores the head_dim of {path}, {config['head_dim']}: it computes with {usual}"
            raise EngineLoadError("unknown-family", what, hint)
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if window is not None and int(window) < settings.max_len and family != "mistral":  # 3
        what = f"{settings.source} uses a sliding window of {window} tokens, which Optimum Neuron ignores"
        raise EngineLoadError("window-not-kept", what, f"set `max_len` to at most {window}, or use the cpu engine")
