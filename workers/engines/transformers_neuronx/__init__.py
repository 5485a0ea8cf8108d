"""The transformers-neuronx engine."""
