"""Encoders that torch-neuronx traces for NeuronCores."""
