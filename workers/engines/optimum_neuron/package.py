"""The installed Optimum Neuron: its version, its era, and the configuration of a model."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from placements.engines.optimum_neuron.capabilities import OptimumEra, optimum_era
from placements.engines.registry import ENGINES
from workers.compiled import neuron_target
from workers.engines.checkpoint_files import check_rotary, read_config
from workers.engines.engine_setup import dtype_on, not_installed
from workers.engines.optimum_neuron.settings import MAX_TOP_K, OptimumSettings
from workers.host.start_phases import START
from workers.messages.engine_protocol import EngineLoadError

ENGINE = DISTRIBUTION = "optimum-neuron"


@dataclass(frozen=True)
class OptimumPackage:
    """A version of Optimum Neuron."""

    version: str
    era: OptimumEra

    @property
    def model_class(self) -> Any:
        """The class that picks the model's own. Imports the package. Raises EngineLoadError."""
        try:
            model_class = importlib.import_module("optimum.neuron").NeuronModelForCausalLM
        except (ImportError, RuntimeError) as error:  # its lazy module raises RuntimeError
            raise not_installed(ENGINE, getattr(error, "name", None) or str(error)) from error
        START.end("imports")
        return model_class

    @property
    def compiler(self) -> str:
        """The version of neuronx-cc, as the package records it. Imports the package. Raises EngineLoadError."""
        try:
            return str(importlib.import_module("optimum.neuron.utils.version_utils").get_neuronxcc_version())
        except ImportError as error:
            raise not_installed(ENGINE, error.name or "neuronx-cc") from error


def find_package() -> OptimumPackage:
    """Returns the installed version, without importing it. Raises EngineLoadError."""
    try:
        version = metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError as error:
        raise not_installed(ENGINE, DISTRIBUTION) from error
    era = optimum_era(version)
    if era is None:
        fact = f"Optimum Neuron {version} is not supported: only 0.0.28, and 0.4.2 and later"
        raise EngineLoadError("engine-not-installed", fact, ENGINES[ENGINE].install)
    return OptimumPackage(version, era)


def export_config(package: OptimumPackage, settings: OptimumSettings) -> tuple[Any, Any]:
    """Returns transformers' configuration and the NxDNeuronConfig that ``settings`` are exported with.

    The package chooses whether its class batches continuously, joins the weights of Q, K and V, and supports sampling
    on the device. Raises EngineLoadError where it does not support the settings.
    """
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(settings.source)
    written = read_config(Path(settings.source))
    check_rotary(written, config)
    config.dtype = getattr(torch, dtype_on(ENGINE, settings.dtype))
    choose = package.model_class.get_neuron_config
    more: dict[str, Any] = {}
    if "prefill_chunk_size" in inspect.signature(choose).parameters:
        more["prefill_chunk_size"] = settings.prefill_chunk_size
    elif settings.prefill_chunk_size:
        fact = f"Optimum Neuron {package.version} has no prefill_chunk_size; 0.4.6 and later have it"
        raise EngineLoadError("bad-engine-option", fact, "remove `engine_options.prefill_chunk_size`")
    try:
        neuron = choose(
            settings.source,
            config=config,
            instance_type=neuron_target.current().name,
            batch_size=settings.slots,
            sequence_length=settings.max_len,
            tensor_parallel_size=settings.tp_degree,
            **more,
        )
    except ValueError as error:
        raise EngineLoadError("unknown-family", f"Optimum Neuron {package.version}: {error}") from error
    if settings.sampling == "device" and not neuron.on_device_sampling:
        fact = f"Optimum Neuron {package.version} does not sample tokens of {settings.source} on the device"
        raise EngineLoadError("bad-engine-option", fact, "set `sampling: host`")
    neuron.on_device_sampling = settings.sampling == "device"
    neuron.max_topk = min(MAX_TOP_K, int(written["vocab_size"]))
    if settings.slots > 1 and not neuron.continuous_batching and getattr(neuron, "prefill_chunk_size", None):
        # A chunk of a static batch would be of all slots at once.
        neuron.prefill_chunk_size = 0
    return config, neuron
