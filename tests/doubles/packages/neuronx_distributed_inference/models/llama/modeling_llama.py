"""The classes of Llama."""

from neuronx_distributed_inference.models.families import classes

globals().update(classes("Llama"))
