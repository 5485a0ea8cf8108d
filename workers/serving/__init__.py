"""A replica: its Ray actor, its data plane, its metrics and spans."""
