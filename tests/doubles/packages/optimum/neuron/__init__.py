"""A stand-in of Optimum Neuron with its NxD backend: 0.4.5, or 0.4.6.dev4 by $NEURON_DOUBLE_OPTIMUM_VERSION."""

from optimum.neuron.modeling_utils import NeuronModelForCausalLM
from optimum.neuron.version import __version__

__all__ = ["NeuronModelForCausalLM", "__version__"]
