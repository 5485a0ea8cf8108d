"""The part of torch-neuronx that NxD Inference runs: a compiler that keeps modules, and a runtime that calls them."""

import torch
from closed_layer import BlankModule, blank

from torch_neuronx import compiled_model

__version__ = "2.9.0.0"
__getattr__ = blank(__name__)

torch.classes.neuron = BlankModule("torch.classes.neuron")  # for annotations
torch.jit.load = compiled_model.loading(torch.jit.load)
