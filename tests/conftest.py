"""Fixtures that tests of several folders use."""

from tests.doubles import neuron as neuron
