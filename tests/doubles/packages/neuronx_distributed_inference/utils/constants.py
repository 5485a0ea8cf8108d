"""Which class plays which architecture, by version."""

from neuronx_distributed_inference.models.families import registry

MODEL_TYPES = registry()
