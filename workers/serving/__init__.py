"""A replica: its Ray actor, data plane, metrics and spans."""
