"""Neuron's persistent cache of compiled graphs (NEFFs): its entries, transfer between hosts, and predictions of hits.

``entries`` reads the cache, ``sync`` copies it to and from a host, ``record`` describes what a model was compiled from,
and ``predict`` predicts whether a start compiles. Imports neither Ray nor torch; only ``sync`` uses the network.
This cache, fetched models and compiled sets have three stores, because their keys differ: the hash of the compiler's
wrapper, the content of a source, and the manifest of a start.
"""
