"""Prepares wanted replicas for their start: resolves engines, fetches and compiles models."""
