"""How a worker runs the engine ``echo``."""

from __future__ import annotations

from workers.engines.echo.engine import open_echo, open_echo_encoder
from workers.engines.runner import Runner

RUNNER = Runner(generate=open_echo, encode=open_echo_encoder)
