"""See ``closed_layer``."""

from closed_layer import blank

__getattr__ = blank(__name__)
