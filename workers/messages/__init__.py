"""Values shared between processes (replica configuration, requests, status, metrics) and the engine protocol."""
