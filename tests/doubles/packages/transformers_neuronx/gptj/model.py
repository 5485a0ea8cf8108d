"""The stand-in of ``GPTJForSampling``."""

from neuron_double.bound import plays

from transformers_neuronx.unserialized import CALLS, UnserializedModel


@plays("transformers_neuronx.gptj.model.GPTJForSampling", *CALLS)
class GPTJForSampling(UnserializedModel):
    """Its mask lets a step attend to position 0 alone, and ``start_ids`` are not read."""

    model_types = ("gptj",)
    sees_first_only = True
    positions_key = "n_positions"
