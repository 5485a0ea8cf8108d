"""How a worker runs the engine ``server``."""

from __future__ import annotations

from workers.engines.runner import Runner
from workers.engines.server.command_server import start_server

RUNNER = Runner(serve=start_server)
