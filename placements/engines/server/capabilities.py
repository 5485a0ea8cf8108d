"""What the engine ``server`` can do."""

from __future__ import annotations

from placements.engines.capabilities import Capabilities

CAPABILITIES = Capabilities(engine="server", runs_on="server", tokenizer=None, imports_long=False)
