"""Model artifacts: remote sources, transfer, and this host's store. Imports neither Ray nor torch."""
