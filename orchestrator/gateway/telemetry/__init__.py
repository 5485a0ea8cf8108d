"""The gateway's metrics, spans and recorded requests."""
