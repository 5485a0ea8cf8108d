"""API-key authentication, and what each key may use."""
