"""See ``closed_layer``."""

from closed_layer import blank

__version__ = "2.9.0"
__getattr__ = blank(__name__)
