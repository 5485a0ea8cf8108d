"""The version that is played."""

import os

__version__ = os.environ.get("NEURON_DOUBLE_OPTIMUM_VERSION", "0.4.5")
