"""Embeddings, scores of pairs, and classes: reading requests and writing answers."""
