"""NeuronConfig and its kin: hundreds of options, by version; unknown ones are only logged."""

from __future__ import annotations

import enum
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from neuron_double.machine import instance

from neuronx_distributed_inference._played import has, kwargs_options, played

_HERE = "models.config"
CONFIG_FILE = "neuron_config.json"


def to_torch_dtype(dtype_str: str) -> torch.dtype:
    return getattr(torch, str(dtype_str).removeprefix("torch."))  # type: ignore[no-any-return]


def take(self: Any, dotted: str, kwargs: dict[str, Any]) -> None:
    """Sets each option of the version on ``self``, from ``kwargs`` or its recorded default; takes it out of both."""
    waiting: dict[str, str] = {}
    for name, default in kwargs_options(dotted).items():
        if name in kwargs:
            setattr(self, name, kwargs.pop(name))
        elif default == "<no default>":
            if not hasattr(self, name):
                setattr(self, name, None)
        else:
            waiting[name] = default
    while waiting:  # a default may be made of another option
        settled = {name for name, default in waiting.items() if _evaluated(self, name, default)}
        if not settled:  # what only the machine could tell
            for name in waiting:
                setattr(self, name, None)
            return
        waiting = {name: default for name, default in waiting.items() if name not in settled}


def _evaluated(self: Any, name: str, default: str) -> bool:
    try:
        value = eval(default, {"__builtins__": {}, "self": self, "float": float})
    except (AttributeError, NameError):
        return False
    setattr(self, name, value)
    return True


def _warn(what: str, kwargs: dict[str, Any]) -> None:
    if kwargs:
        logging.getLogger("Neuron").warning("%s: unexpected keyword arguments: %s", what, kwargs)


class OnDeviceSamplingConfig:
    @played(f"{_HERE}.OnDeviceSamplingConfig.__init__")
    def __init__(self, **kwargs: Any) -> None:
        take(self, f"{_HERE}.OnDeviceSamplingConfig", kwargs)
        _warn("OnDeviceSamplingConfig", kwargs)


class QuantizationType(enum.Enum):
    PER_TENSOR_SYMMETRIC = "per_tensor_symmetric"
    PER_CHANNEL_SYMMETRIC = "per_channel_symmetric"


class KVQuantizationConfig:
    """The switch of the quantized KV cache from 0.8 on. Written to JSON, it cannot be read back: its enumerations
    become mappings, which the assertion refuses."""

    def __init__(self, **kwargs: Any) -> None:
        methods = [
            kwargs.pop(name, QuantizationType.PER_TENSOR_SYMMETRIC) for name in ("k_quant_method", "v_quant_method")
        ]
        self.k_quant_method, self.v_quant_method = methods
        self.quant_dtype = kwargs.pop("quant_dtype", torch.float8_e4m3fn)
        self.direct_cast = kwargs.pop("direct_cast", True)
        if self.direct_cast:
            assert methods == [QuantizationType.PER_TENSOR_SYMMETRIC] * 2, "direct cast is per tensor"


class NeuronConfig:
    """Every option of the version is an attribute."""

    @played(f"{_HERE}.NeuronConfig.__init__")
    def __init__(self, **kwargs: Any) -> None:
        dtype = kwargs.pop("torch_dtype", None)
        lnc = kwargs.pop("logical_nc_config", None) or kwargs.pop("logical_neuron_cores", None)
        overrides = kwargs.pop("overrides_torch_dtype", None)
        named = os.environ.get("NEURON_LOGICAL_NC_CONFIG")
        self.logical_nc_config = int(named or lnc or instance().lnc or 1)  # the environment has the last word
        take(self, f"{_HERE}.NeuronConfig", kwargs)
        self.overrides_torch_dtype = dtype is not None if overrides is None else overrides
        self.torch_dtype = torch.bfloat16 if dtype is None else dtype
        if isinstance(self.torch_dtype, str):
            self.torch_dtype = to_torch_dtype(self.torch_dtype)
        sampling = self.on_device_sampling_config
        if isinstance(sampling, dict):
            self.on_device_sampling_config = OnDeviceSamplingConfig(**sampling)
        if isinstance(getattr(self, "kv_quant_config", None), dict):
            self.kv_quant_config: Any = KVQuantizationConfig(**self.kv_quant_config)
        if getattr(self, "enable_eagle_speculation", False):
            self.enable_fused_speculation = True
        if self.quantized and not self.quantized_checkpoints_path:
            raise AssertionError("quantized_checkpoints_path is required for quantized weights")
        if self.quantized and self.quantization_dtype not in ("int8", "f8e4m3", "f8e5m2"):
            raise AssertionError(f"{self.quantization_dtype} is not a valid QuantizedDtype.")
        _warn("NeuronConfig", kwargs)

    on_device_sampling_config: Any
    quantized: Any
    quantized_checkpoints_path: Any
    quantization_dtype: Any


class MoENeuronConfig(NeuronConfig):
    @played(f"{_HERE}.MoENeuronConfig.__init__")
    def __init__(self, capacity_factor: Any = None, glu_mlp: bool = True, **kwargs: Any) -> None:
        self.capacity_factor = None if capacity_factor is None else float(capacity_factor)
        self.glu_mlp = glu_mlp
        take(self, f"{_HERE}.MoENeuronConfig", kwargs)
        super().__init__(**kwargs)


class FusedSpecNeuronConfig:
    """Both models of a fused speculation."""

    @played(f"{_HERE}.FusedSpecNeuronConfig.__init__")
    def __init__(
        self, worker_cls: Any, draft_config: Any = None, draft_model_path: Any = None, draft_model_cls: Any = None
    ) -> None:
        self.worker_cls = worker_cls
        self.draft_config = draft_config
        self.draft_model_path = draft_model_path
        if has(f"{_HERE}.InferenceConfig.get_draft_neuron_class"):
            self.draft_model_cls = draft_model_cls


class InferenceConfig:
    """A NeuronConfig, and everything that the checkpoint's config.json says as attributes."""

    neuron_config: Any
    fused_spec_config: Any = None

    @played(f"{_HERE}.InferenceConfig.__init__")
    def __init__(
        self,
        neuron_config: Any,
        fused_spec_config: Any = None,
        load_config: Callable[[Any], None] | None = None,
        metadata: Any = None,
        **kwargs: Any,
    ) -> None:
        self.neuron_config = neuron_config
        self.fused_spec_config = fused_spec_config
        self.metadata = metadata
        if load_config is not None:
            load_config(self)
        for name, value in kwargs.items():
            setattr(self, name, value)
        missing = [name for name in self.get_required_attributes() if not hasattr(self, name)]
        if missing:
            raise AssertionError(f"Config must define {missing}")

    @played(f"{_HERE}.InferenceConfig.get_required_attributes")
    def get_required_attributes(self) -> list[str]:
        return []

    @played(f"{_HERE}.InferenceConfig.save")
    def save(self, model_path: str) -> None:
        (Path(model_path) / CONFIG_FILE).write_text(self.to_json_string())

    @played(f"{_HERE}.InferenceConfig.to_json_string")
    def to_json_string(self) -> str:
        return json.dumps(_plain(self), indent=2, sort_keys=True)

    @classmethod
    @played(f"{_HERE}.InferenceConfig.from_json_string")
    def from_json_string(cls, json_string: str, **kwargs: Any) -> Any:
        settings = json.loads(json_string) | kwargs
        neuron = settings.pop("neuron_config")
        if isinstance(neuron, dict):
            neuron = cls.get_neuron_config_cls()(**neuron)
        fused = settings.pop("fused_spec_config", None)
        if fused is not None:
            draft = cls.from_json_string(json.dumps(fused["draft_config"]))
            fused = FusedSpecNeuronConfig(None, draft_config=draft, draft_model_path=fused["draft_model_path"])
        settings.pop("metadata", None)
        return cls(neuron, fused_spec_config=fused, **settings)

    @classmethod
    @played(f"{_HERE}.InferenceConfig.get_neuron_config_cls")
    def get_neuron_config_cls(cls) -> Any:
        return NeuronConfig


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, enum.Enum):
        return {"_name_": value.name, "_value_": value.value}
    if isinstance(value, type):
        return {"__module__": value.__module__, "__name__": value.__name__}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return _plain({name: item for name, item in vars(value).items() if not callable(item)})
