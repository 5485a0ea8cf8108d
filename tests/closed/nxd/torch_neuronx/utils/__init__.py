"""See ``closed_layer``."""

from closed_layer import blank

from torch_neuronx.utils.utils import SUPPORTED_TYPES, get_platform_target

__all__ = ["SUPPORTED_TYPES", "get_platform_target"]
__getattr__ = blank(__name__)
