"""The engine vllm: `vllm serve` on the cores of a replica."""
