"""vLLM's own server, with AWS's plugin on NeuronCores."""
