"""The class of a checkpoint, by its model_type."""

from __future__ import annotations

from typing import Any

from neuron_double.bound import bound
from transformers import AutoConfig

from transformers_neuronx.bloom.model import BloomForSampling
from transformers_neuronx.gpt2.model import GPT2ForSamplingWithContextBroadcasting
from transformers_neuronx.gptj.model import GPTJForSampling
from transformers_neuronx.gptneox.model import GPTNeoXForSampling
from transformers_neuronx.llama.model import LlamaForSampling
from transformers_neuronx.mistral.model import MistralForSampling
from transformers_neuronx.mixtral.model import MixtralForSampling
from transformers_neuronx.opt.model import OPTForSampling

NEURON_MODEL_FOR_CAUSAL_LM_MAPPING = {
    model_type: kind
    for kind in (
        BloomForSampling,
        GPT2ForSamplingWithContextBroadcasting,
        GPTJForSampling,
        GPTNeoXForSampling,
        LlamaForSampling,
        MistralForSampling,
        MixtralForSampling,
        OPTForSampling,
    )
    for model_type in kind.model_types
}


class NeuronAutoModelForCausalLM:
    @classmethod
    @bound("transformers_neuronx.modeling_auto.NeuronAutoModelForCausalLM.from_pretrained")
    def from_pretrained(cls, pretrained_model_name_or_path: str, *model_args: Any, **kwargs: Any) -> Any:
        """Raises KeyError for a model_type that is not in the registry."""
        model_type = AutoConfig.from_pretrained(pretrained_model_name_or_path).model_type
        if model_type not in NEURON_MODEL_FOR_CAUSAL_LM_MAPPING:
            raise KeyError(model_type)
        kind = NEURON_MODEL_FOR_CAUSAL_LM_MAPPING[model_type]
        return kind.from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
