"""Neuron's persistent cache of compiled graphs (NEFFs): what is in it, where it comes from, and what a start will find.

``entries`` reads the cache, ``sync`` brings it to a host and back, ``record`` tells what a model was compiled from, and
``predict`` says beforehand whether a start compiles. No Ray, no torch; ``sync`` alone reaches beyond this host.
"""
