"""Optimum Neuron, Hugging Face's library for Neuron devices."""
