"""Validates ``engine_options`` against the recorded options of the Neuron packages."""
