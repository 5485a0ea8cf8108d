"""transformers-neuronx, AWS's first library for generation on NeuronCores."""
