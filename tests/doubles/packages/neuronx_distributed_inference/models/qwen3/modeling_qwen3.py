"""The stand-in of Qwen3."""

from neuronx_distributed_inference.models.families import classes

globals().update(classes(__name__))
