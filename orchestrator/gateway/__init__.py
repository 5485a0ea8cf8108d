"""The gateway: an OpenAI-compatible server in front of all models of a fleet."""
