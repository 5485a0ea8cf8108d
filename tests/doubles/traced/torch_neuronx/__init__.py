"""A stand-in of torch-neuronx's traces, from AWS's documentation; the package is closed.

It runs what was traced with torch on the CPU, and refuses what the documentation calls an error, and also what it only
warns of: arguments by position, unused inputs, a call whose weights are not on the core.
"""

import torch

from torch_neuronx import _traces
from torch_neuronx._traces import dynamic_batch, move_trace_to_device, replace_weights, trace

__version__ = "2.8.0.2.10.16998"
__all__ = ["dynamic_batch", "move_trace_to_device", "replace_weights", "trace"]

# The package teaches torch to save and load its traces by its import.
torch.jit.save, torch.jit.load = _traces.saving(torch.jit.save), _traces.loading(torch.jit.load)
