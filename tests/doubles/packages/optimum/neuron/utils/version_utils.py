"""The version of the compiler."""

from neuron_double.compiler import compiler_version as get_neuronxcc_version

__all__ = ["get_neuronxcc_version"]
