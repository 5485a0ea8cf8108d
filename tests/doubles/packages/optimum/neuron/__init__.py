"""A stand-in of Optimum Neuron: 0.4.5, or 0.4.6.dev4 or 0.0.28 by $NEURON_DOUBLE_OPTIMUM_VERSION."""

import importlib
from typing import Any

from optimum.neuron.version import __version__

_place = "modeling" if __version__ == "0.0.28" else "models.inference.modeling_utils"
NeuronModelForCausalLM: Any = importlib.import_module(f"optimum.neuron.{_place}").NeuronModelForCausalLM

__all__ = ["NeuronModelForCausalLM", "__version__"]
