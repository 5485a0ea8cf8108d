"""The stand-in of ``MistralForSampling``."""

from neuron_double.bound import plays

from transformers_neuronx.config import NeuronConfig
from transformers_neuronx.lines import LinesModel


@plays("transformers_neuronx.mistral.model.MistralForSampling", "__init__", "forward")
class MistralForSampling(LinesModel):
    model_types = ("mistral",)
    neuron_config_default = NeuronConfig()  # one object for all models, as the package has it
