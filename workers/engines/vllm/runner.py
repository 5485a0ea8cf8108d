"""How a worker runs the engine ``vllm``."""

from __future__ import annotations

from workers.engines.runner import Runner
from workers.engines.vllm.engine import buildables, start_vllm

RUNNER = Runner(
    serve=start_vllm,
    buildables=buildables,
    check=lambda config: None,  # its interpreter was checked; the rest is known when it starts
)
