"""The gateway's metrics, trace spans and recorded requests."""
