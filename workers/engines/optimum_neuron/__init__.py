"""The Optimum Neuron engine."""
