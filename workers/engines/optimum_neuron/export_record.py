"""The settings of an export as Optimum Neuron records them, compared with those of a spec."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from placements.facts.engines import OptimumEra
from workers.engines.engine_setup import dtype_on
from workers.engines.optimum_neuron.settings import OptimumSettings
from workers.neff_cache.predict import Difference

_CAST_TYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


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
        return _CAST_TYPES.get(cast, cast)

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
