"""The daemon of `corewright up`: its settings, and the process that owns a Ray cluster."""
