"""The benchmark of any OpenAI-compatible server: total latency and tokens/s at 25, 50 and 75 % of a length."""
