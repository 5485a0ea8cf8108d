"""The stand-in of ``OPTForSampling``."""

from typing import Any

import torch
from neuron_double.bound import plays

from transformers_neuronx.dtypes import to_amp
from transformers_neuronx.static import StaticModel


@plays("transformers_neuronx.opt.model.OPTForSampling", "__init__", "forward")
class OPTForSampling(StaticModel):
    model_types = ("opt",)

    def _check(self, config: Any) -> None:
        assert config.do_layer_norm_before, "only models with do_layer_norm_before are supported"
        assert config.ffn_dim == 4 * config.hidden_size, "ffn_dim must be 4 * hidden_size"

    def _defaults(self, config: Any) -> dict[str, Any]:
        return {**super()._defaults(config), "amp": to_amp(getattr(config, "dtype", None) or torch.float32)}
