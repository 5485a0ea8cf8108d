"""A stand-in of transformers-neuronx: its names, its checks, and the greedy tokens of transformers.

It is held to the traces of the package's own code (tests/golden/traces), and refuses what it does not compute. Methods
are bound against the recorded signatures of the version in NEURON_DOUBLE_TNX_VERSION.
"""

import sys
from types import ModuleType

from neuron_double.bound import bound

from transformers_neuronx.base import (
    BloomForSampling,
    GPT2ForSamplingWithContextBroadcasting,
    GPTNeoXForSampling,
    LlamaForSampling,
    MistralForSampling,
    MixtralForSampling,
    OPTForSampling,
)

KINDS = {
    "bloom": BloomForSampling,
    "code_llama": LlamaForSampling,
    "gpt2": GPT2ForSamplingWithContextBroadcasting,
    "gpt_neox": GPTNeoXForSampling,
    "llama": LlamaForSampling,
    "mistral": MistralForSampling,
    "mixtral": MixtralForSampling,
    "opt": OPTForSampling,
}


def _module(name: str, **content: object) -> None:
    """Adds a module of the package that has no file here."""
    module = sys.modules.setdefault(f"{__name__}.{name}", ModuleType(f"{__name__}.{name}"))
    vars(module).update(content)
    parent, _, child = module.__name__.rpartition(".")
    setattr(sys.modules[parent], child, module)


def _refuse(*_: object, **__: object) -> None:
    """What the adapter does not call. Raises NotImplementedError."""
    raise NotImplementedError("the stand-in of transformers-neuronx has no such function")


for kind in set(KINDS.values()):
    _module(kind.family)
    _module(f"{kind.family}.model", **{kind.__name__: kind})
auto = {"from_pretrained": bound(f"{__name__}.modeling_auto.NeuronAutoModelForCausalLM.from_pretrained")(_refuse)}
auto_class = type("NeuronAutoModelForCausalLM", (), auto)
_module("modeling_auto", NEURON_MODEL_FOR_CAUSAL_LM_MAPPING=KINDS, NeuronAutoModelForCausalLM=auto_class)
_module("module", save_pretrained_split=bound(f"{__name__}.module.save_pretrained_split")(_refuse))
functions = ("context_sizes", "token_sizes", "find")
_module("bucket", **{name: bound(f"{__name__}.bucket.{name}")(_refuse) for name in functions})
