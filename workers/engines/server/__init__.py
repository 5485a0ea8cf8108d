"""The engine server: any command that serves OpenAI's API, and what every server of a replica needs."""
