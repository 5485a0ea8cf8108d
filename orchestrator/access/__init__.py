"""Access control: API keys, TLS, rate limits, allowed sources, and the audit log."""
