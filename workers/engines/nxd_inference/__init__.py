"""The NxD Inference engine."""
