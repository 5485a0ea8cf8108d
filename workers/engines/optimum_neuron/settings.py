"""The settings of a model that Optimum Neuron's artifacts depend on, and what its classes do not compute.

Pure: the package is not imported, so that the planner, the compiling process and the loading one agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from placements.engines.capabilities import Dtype
from placements.engines.optimum_neuron.capabilities import OptimumEra
from workers.compiled.prediction import Difference
from workers.engines.engine_setup import TORCH_DTYPES, CheckpointSettings, dtype_on
from workers.messages.engine_protocol import EngineLoadError

MAX_TOP_K = 256  # ids that the device samples from: the default of NxDNeuronConfig's max_topk


class OptimumSettings(CheckpointSettings, frozen=True):
    """The part of a replica's configuration that the artifacts and their use depend on."""

    source: str
    dtype: Dtype
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
            fact = f"Optimum Neuron ignores the head_dim of {path}, {config['head_dim']}: it computes with {usual}"
            raise EngineLoadError("unknown-family", fact, hint)
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if window is not None and int(window) < settings.max_len and family != "mistral":  # 3
        fact = f"{settings.source} uses a sliding window of {window} tokens, which Optimum Neuron ignores"
        raise EngineLoadError("window-not-kept", fact, f"set `max_len` to at most {window}, or use the cpu engine")


@dataclass(frozen=True)
class ExportRecord:
    """What one version of the package wrote of an export."""

    era: OptimumEra
    recorded: Mapping[str, Any]

    @property
    def cores_field(self) -> str:
        return "tp_degree" if self.era == "nxd" else "num_cores"

    @property
    def dtype(self) -> str:
        """As torch names it."""
        if self.era == "nxd":
            return str(self.recorded.get("torch_dtype"))
        cast = str(self.recorded.get("auto_cast_type"))
        return TORCH_DTYPES.get(cast, cast)

    def differences(self, settings: OptimumSettings) -> Iterator[Difference]:
        """Yields each of ``settings`` that the export was not made with."""
        recorded = self.recorded
        pairs: dict[str, tuple[Any, Any]] = {
            f"tp_degree ({self.cores_field})": (settings.tp_degree, recorded.get(self.cores_field)),
            "max_batch (batch_size)": (settings.slots, recorded.get("batch_size")),
            "max_len (sequence_length)": (settings.max_len, recorded.get("sequence_length")),
            "dtype": (dtype_on("optimum-neuron", settings.dtype), self.dtype),
        }
        if self.era == "nxd":
            on_device = bool(recorded.get("on_device_sampling"))
            pairs |= {
                "sampling (on_device_sampling)": (settings.sampling, "device" if on_device else "host"),
                "speculation_length": (0, recorded.get("speculation_length", 0)),
            }
            if settings.prefill_chunk_size is not None:
                chunk = recorded.get("prefill_chunk_size", 0)
                pairs["engine_options.prefill_chunk_size"] = (settings.prefill_chunk_size, chunk)
            if not recorded.get("continuous_batching") and settings.slots > 1:
                pairs["prefill_chunk_size of a static batch"] = (0, recorded.get("prefill_chunk_size", 0))
        elif settings.sampling == "device":
            pairs["sampling"] = ("device", "host")
        return (Difference(name, wanted, found) for name, (wanted, found) in pairs.items() if wanted != found)
