"""The torch-neuronx engine: encoders as traces of AWS's package, one for each length bucket."""
