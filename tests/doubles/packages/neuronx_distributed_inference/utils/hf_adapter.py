"""Reading a checkpoint's configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig

from neuronx_distributed_inference._played import played


@played("utils.hf_adapter.load_pretrained_config")
def load_pretrained_config(model_path_or_name: Any = None, hf_config: Any = None) -> Callable[[Any], None]:
    """A hook for InferenceConfig, which sets all that config.json says."""

    def load_config(self: Any) -> None:
        config = AutoConfig.from_pretrained(model_path_or_name) if hf_config is None else hf_config
        plain = config.to_dict()
        rope = plain.get("rope_parameters") or {}
        if "rope_theta" in rope:
            plain.setdefault("rope_theta", rope["rope_theta"])
        for name, value in plain.items():
            setattr(self, name, value)
        for alias, name in getattr(config, "attribute_map", {}).items():
            if hasattr(config, name):
                setattr(self, alias, getattr(config, name))
        for name in ("pad_token_id", "rope_scaling", "tie_word_embeddings", "head_dim"):
            if not hasattr(self, name):
                setattr(self, name, getattr(config, name, None))
        self.hf_config = {name: value for name, value in plain.items() if name not in ("model_type", "torch_dtype")}
        self.hf_config.pop("dtype", None)
        self._name_or_path = str(model_path_or_name or config._name_or_path)
        dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
        if not self.neuron_config.overrides_torch_dtype and isinstance(dtype, torch.dtype):
            self.neuron_config.torch_dtype = dtype
        for name in ("torch_dtype", "dtype"):
            vars(self).pop(name, None)

    return load_config
