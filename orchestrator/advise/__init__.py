"""Advice on sizes: which instance type, degree, batch and number of replicas serve a model, and which buckets."""
