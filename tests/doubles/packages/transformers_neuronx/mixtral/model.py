"""The stand-in of ``MixtralForSampling``."""

from neuron_double.bound import plays

from transformers_neuronx.config import NeuronConfig
from transformers_neuronx.lines import LinesModel


@plays("transformers_neuronx.mixtral.model.MixtralForSampling", "__init__", "forward")
class MixtralForSampling(LinesModel):
    model_types = ("mixtral",)
    neuron_config_default = NeuronConfig()  # one object for all models, as the package has it
