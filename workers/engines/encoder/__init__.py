"""Engines of models that encode whole texts: embeddings, rerankers and classifiers."""
