"""A revision of the spec: read from its file, resolved against hosts and checkpoints, and rolled back."""
