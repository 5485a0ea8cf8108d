"""The client's side of a fleet: how fast any OpenAI-compatible server answers. docs/bench.md has the definitions."""
