"""Instructions, computations and modules of HLO."""

from torch_neuronx.pyhlo import xla_data_pb2  # noqa: F401 - the descriptors below refer to it
from torch_neuronx.pyhlo.messages import publish

publish(__name__, globals())
