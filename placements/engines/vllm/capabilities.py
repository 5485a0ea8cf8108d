"""What the engine ``vllm`` can do."""

from __future__ import annotations

from placements.engines.capabilities import Capabilities

CAPABILITIES = Capabilities(engine="vllm", runs_on="server", runs_code=True, imports_long=False)
