"""The stand-in of ``GPTNeoXForSampling``."""

from typing import Any

from neuron_double.bound import plays

from transformers_neuronx.as_computed import check_rotary
from transformers_neuronx.unserialized import CALLS, UnserializedModel


@plays("transformers_neuronx.gptneox.model.GPTNeoXForSampling", *CALLS)
class GPTNeoXForSampling(UnserializedModel):
    model_types = ("gpt_neox",)
    positions_key = "max_position_embeddings"

    def _check(self, config: Any, unroll: Any) -> None:
        check_rotary(config)
        assert config.use_parallel_residual, "only models with use_parallel_residual are supported"
        assert unroll is None, "unroll must be None"
