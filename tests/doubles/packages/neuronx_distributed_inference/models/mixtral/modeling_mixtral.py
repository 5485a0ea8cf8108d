"""The stand-in of Mixtral."""

from neuronx_distributed_inference.models.families import classes

globals().update(classes(__name__))
