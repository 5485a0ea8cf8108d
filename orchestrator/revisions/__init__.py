"""Revisions of the spec: read from a file, resolved against hosts and checkpoints, and rolled back."""
