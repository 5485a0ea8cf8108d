"""NxD Inference, AWS's library for generation on NeuronX Distributed."""
