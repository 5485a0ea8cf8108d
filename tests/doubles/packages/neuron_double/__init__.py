"""A stand-in of the Neuron runtime and compiler, shared by the stand-ins of the packages that use them."""
