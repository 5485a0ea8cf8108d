"""The benchmark client for any OpenAI-compatible server; docs/bench.md defines its metrics."""
