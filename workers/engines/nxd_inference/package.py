"""The installed NxD Inference package: its version, model classes, and configurations built from plain options."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from placements.engines.nxd_inference.capabilities import (
    NXD_FUSED_QKV,
    NXD_UNQUANTIZED,
    NXD_VERSIONS,
    NXD_WINDOW,
    Release,
    nxd_release,
)
from placements.engines.registry import ENGINES
from placements.facts.versions import reaches
from workers.engines.checkpoint_files import check_rotary, eos_token_ids, read_config
from workers.engines.engine_setup import check_vocabularies, not_installed
from workers.engines.nxd_inference.config import (
    MOE_OPTIONS,
    NxdSettings,
    draft_options,
    lengths,
    neuron_options,
    window_of,
)
from workers.host.start_phases import START
from workers.messages.engine_protocol import EngineLoadError

ENGINE, NAME, DISTRIBUTION = "nxd-inference", "neuronx_distributed_inference", "neuronx-distributed-inference"
CONFIG_CLASSES = {  # options that are objects
    "on_device_sampling_config": "OnDeviceSamplingConfig",
    "hybrid_sharding_config": "HybridShardingConfig",
    "tensor_capture_config": "TensorCaptureConfig",
    "tensor_replacement_config": "TensorReplacementConfig",
}


@dataclass(frozen=True)
class Package:
    """An imported version of NxD Inference."""

    version: str
    modules: Mapping[str, Any]  # by the last part of their name

    @property
    def release(self) -> Release:
        return nxd_release(self.version)


def require_package() -> None:
    """Raises EngineLoadError where the package is not installed. Does not import it."""
    if importlib.util.find_spec(NAME) is None:
        raise not_installed(ENGINE, NAME)


def import_package() -> Package:
    """Import the package; the environment is complete (``placements.resources.environ``). Raises EngineLoadError."""
    require_package()
    try:
        names = ("models.config", "utils.constants", "utils.hf_adapter", "modules.generation.sampling")
        modules = {name.rpartition(".")[2]: importlib.import_module(f"{NAME}.{name}") for name in names}
        version = getattr(importlib.import_module(NAME), "__version__", None) or metadata.version(DISTRIBUTION)
    except (ImportError, metadata.PackageNotFoundError) as error:
        raise not_installed(ENGINE, error.name or NAME) from error
    START.end("imports")
    if not reaches(str(version), NXD_VERSIONS[0]):
        message = f"NxD Inference {version} is not supported, the first supported version is {NXD_VERSIONS[0]}"
        raise EngineLoadError("engine-not-installed", message, ENGINES[ENGINE].install)
    return Package(str(version), modules)


def model_class(package: Package, source: Path, settings: NxdSettings) -> Any:
    """Returns the class for a checkpoint, by its model_type. Raises EngineLoadError.

    Before 0.9 Mistral has no class of its own and runs as Llama, which supports its sliding window from 0.7 on. A step
    of several tokens needs kernels for it, which are not used here (``attention_base.NeuronAttentionBase.__init__``).
    """
    config = read_config(source)
    model_type = str(config.get("model_type"))
    registry = package.modules["constants"].MODEL_TYPES
    name = _class_name(package, model_type)
    if "causal-lm" not in registry.get(name, {}):
        raise EngineLoadError(
            "unknown-family",
            f"NxD Inference {package.version} has no class for the model_type {model_type!r} of {source}",
            f"supported: {', '.join(sorted(registry))}",
        )
    window = window_of(config)
    if window is not None and window < settings.max_len:
        others = {"a draft": settings.draft_source, "a prefix cache": settings.prefix_cache}
        beside = next((f" with {name}" for name, value in others.items() if value), "")
        if beside or model_type != "mistral" or not reaches(package.version, NXD_WINDOW):
            message = f"{source} uses a sliding window of {window} tokens, which NxD Inference {package.version} does "
            message += f"not support for {model_type}{beside}"
            hint = f"set `max_len` to at most {window}, or use the cpu engine"
            raise EngineLoadError("window-not-kept", message, hint)
    return registry[name]["causal-lm"]


def _class_name(package: Package, model_type: str) -> str:
    """Returns the key of the class in the package's registry."""
    is_llama = model_type == "mistral" and "mistral" not in package.modules["constants"].MODEL_TYPES
    return "llama" if is_llama else model_type


def _check_class(package: Package, settings: NxdSettings, source: Path) -> None:
    """Raises EngineLoadError for a setting that the class cannot be compiled with, though the package accepts it."""
    model_type = str(read_config(source).get("model_type"))
    name = _class_name(package, model_type)
    if settings.fuse_qkv and not (name in NXD_FUSED_QKV and reaches(package.version, NXD_FUSED_QKV[name])):
        raise EngineLoadError(
            "bad-engine-option",
            f"NxD Inference {package.version} does not join the weights of Q, K and V of {model_type}",
            "remove `fuse_qkv`",
        )
    if settings.quantize is not None and name in NXD_UNQUANTIZED:
        raise EngineLoadError(
            "bad-engine-option",
            f"NxD Inference {package.version} cannot quantize {model_type}: {NXD_UNQUANTIZED[name]}",
            "remove `quantize`",
        )


def build_config(package: Package, settings: NxdSettings, quantized: str) -> tuple[Any, Any]:
    """Returns the model's class and its InferenceConfig, including the draft's. Raises EngineLoadError.

    ``quantized`` is the folder of the quantized checkpoint.
    """
    source = Path(settings.source)
    kind = model_class(package, source, settings)
    options = neuron_options(settings, lengths(settings), package.release, quantized)
    _check_class(package, settings, source)
    fused = None
    worker = getattr(kind, "_model_cls", None)  # read before an application exists: it stores its fused model there
    if settings.draft_source is not None:
        draft = Path(settings.draft_source)
        own, other = (read_config(path).get("vocab_size") for path in (source, draft))
        check_vocabularies(own, other)
        draft_kind = model_class(package, draft, settings)
        _check_class(package, settings, draft)
        draft_config = _inference_config(package, draft_kind, draft, settings.max_len, draft_options(options), None)
        named = {"draft_model_cls": draft_kind} if package.release >= (0, 7) else {}
        if not named and draft_kind is not kind:
            message = f"NxD Inference {package.version} needs a draft of the same family as the model"
            raise EngineLoadError("bad-draft", message, "use a draft of the same family, or NxD Inference 0.7 or later")
        fused = package.modules["config"].FusedSpecNeuronConfig(
            worker, draft_config=draft_config, draft_model_path=str(draft), **named
        )
    return kind, _inference_config(package, kind, source, settings.max_len, options, fused)


def _inference_config(
    package: Package, kind: Any, source: Path, max_len: int, options: Mapping[str, Any], fused: Any
) -> Any:
    import torch

    config = package.modules["config"]
    neuron_kind = kind.get_neuron_config_cls()
    keywords = dict(options)
    experts = sorted(set(keywords) & MOE_OPTIONS)
    if issubclass(neuron_kind, config.MoENeuronConfig):
        keywords.setdefault("glu_mlp", True)  # its documentation and its code disagree on the default
    elif experts:
        raise EngineLoadError(
            "bad-engine-option", f"`engine_options.{experts[0]}` is for models of experts only", "remove it"
        )
    keywords["torch_dtype"] = getattr(torch, keywords["torch_dtype"])
    for name, class_name in CONFIG_CLASSES.items():
        if isinstance(keywords.get(name), Mapping):
            keywords[name] = getattr(config, class_name)(**keywords[name])
    more = {} if fused is None else {"fused_spec_config": fused}
    inference_config = kind.get_config_cls()(
        neuron_kind(**keywords),
        load_config=package.modules["hf_adapter"].load_pretrained_config(str(source)),
        **more,
    )
    settings = read_config(source)
    check_rotary(settings, inference_config)
    if getattr(inference_config, "head_dim", 0) is None:
        # transformers 4.57 leaves it so for Mistral, which Llama's class takes for a number.
        inference_config.head_dim = inference_config.hidden_size // inference_config.num_attention_heads
    window = window_of(settings)
    if window is not None and window >= max_len:
        inference_config.sliding_window = None  # else the KV cache of each slot is as long as the window
    if getattr(inference_config, "pad_token_id", None) is None:
        # The package pads prompts to their bucket with it.
        eos = eos_token_ids(source, settings)
        inference_config.pad_token_id = min(eos) if eos else 0
    return inference_config
