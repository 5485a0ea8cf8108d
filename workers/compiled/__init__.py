"""Compiled artifacts: their manifests, the places that have them, and what a host prepares before a start.

``places`` has the ordered list of places of a start. Complete sets are in ``host_sets`` and ``shared_sets``; graphs of
Neuron's persistent cache are in ``neuron_cache``, ``graph_records`` and ``graph_sync``. Imports neither Ray nor torch.
These sets, the graphs and fetched models have three stores, because their keys differ: the manifest of a start, the
hash of the compiler's wrapper, and the content of a source.
"""
