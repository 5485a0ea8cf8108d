"""The stand-in of ``BloomForSampling``."""

from neuron_double.bound import plays

from transformers_neuronx.static import StaticModel


@plays("transformers_neuronx.bloom.model.BloomForSampling", "__init__", "forward")
class BloomForSampling(StaticModel):
    model_types = ("bloom",)
