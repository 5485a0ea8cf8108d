"""Stands in for torch-neuronx below transformers-neuronx: writes HLO, and runs it on the CPU.

Importing it registers the operators and classes of libtorchneuron.
"""

from torch_neuronx import runtime

runtime.register()
