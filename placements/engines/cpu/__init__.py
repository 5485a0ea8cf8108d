"""corewright's own engine on the host's CPUs."""
