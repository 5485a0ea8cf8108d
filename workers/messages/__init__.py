"""Values that cross processes: replica configuration, requests, status, metrics, frames; and the engine protocol."""
