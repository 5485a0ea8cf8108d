"""Shapes, types and dimension numbers of HLO."""

from torch_neuronx.pyhlo.messages import publish

publish(__name__, globals())
