"""Compiles the models of a spec before anything starts, and publishes compiled artifacts."""
