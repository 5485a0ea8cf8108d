"""Who may do what: API keys, TLS, rate limits, allowed sources, and the audit log."""
