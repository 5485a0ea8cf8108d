"""A stand-in of NxD Inference: its names, its rules and its silent errors, with torch and transformers underneath.

Written from what the public code and guides tell of it; no code of it is here. It plays the recorded version that
$NEURON_DOUBLE_NXDI_VERSION names.
"""

from neuronx_distributed_inference import _played

_played.register_version()
