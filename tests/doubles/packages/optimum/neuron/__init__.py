"""A stand-in of Optimum Neuron: 0.4.5, or 0.4.6.dev4 or 0.0.28 by $NEURON_DOUBLE_OPTIMUM_VERSION."""

from typing import Any

from optimum.neuron.version import __version__

NeuronModelForCausalLM: Any
if __version__ == "0.0.28":
    from optimum.neuron import modeling_decoder

    NeuronModelForCausalLM = modeling_decoder.NeuronModelForCausalLM
else:
    from optimum.neuron import modeling_utils

    NeuronModelForCausalLM = modeling_utils.NeuronModelForCausalLM

__all__ = ["NeuronModelForCausalLM", "__version__"]
