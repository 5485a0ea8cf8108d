"""A stand-in of transformers-neuronx: its names and manners, computed by torch on the host.

Written from descriptions of the package's behaviour. It refuses what the package refuses and is silently wrong where
the package is; every method is bound against the recorded signature of the version in NEURON_DOUBLE_TNX_VERSION.
"""

from transformers_neuronx.bloom.model import BloomForSampling
from transformers_neuronx.config import (
    ContinuousBatchingConfig,
    GenerationConfig,
    NeuronConfig,
    QuantizationConfig,
)
from transformers_neuronx.constants import GQA, Layout
from transformers_neuronx.gpt2.model import GPT2ForSamplingWithContextBroadcasting
from transformers_neuronx.gptj.model import GPTJForSampling
from transformers_neuronx.gptneox.model import GPTNeoXForSampling
from transformers_neuronx.llama.model import LlamaForSampling
from transformers_neuronx.mistral.model import MistralForSampling
from transformers_neuronx.mixtral.model import MixtralForSampling
from transformers_neuronx.modeling_auto import NeuronAutoModelForCausalLM
from transformers_neuronx.opt.model import OPTForSampling
from transformers_neuronx.sparse_attn_utils import SparseAttnConfig

__all__ = [
    "GQA",
    "BloomForSampling",
    "ContinuousBatchingConfig",
    "GPT2ForSamplingWithContextBroadcasting",
    "GPTJForSampling",
    "GPTNeoXForSampling",
    "GenerationConfig",
    "Layout",
    "LlamaForSampling",
    "MistralForSampling",
    "MixtralForSampling",
    "NeuronAutoModelForCausalLM",
    "NeuronConfig",
    "OPTForSampling",
    "QuantizationConfig",
    "SparseAttnConfig",
]
