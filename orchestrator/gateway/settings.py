"""What `up` tells each gateway of the fleet."""

from __future__ import annotations

from typing import Literal

import msgspec


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Every limit is per gateway. Sizes in bytes, times in seconds."""

    host: str
    port: int
    home: str  # where keys, logs and sockets are
    gateways: int = 1  # processes that share the port
    gateway_spare: bool = True  # one more, which takes over at once from one that dies

    insecure: bool = False  # serve without keys, on whatever address
    tls_cert: str | None = None  # PEM files
    tls_key: str | None = None
    tls_client_ca: str | None = None  # demand of each client a certificate that one of these has signed
    cors_origins: tuple[str, ...] = ()  # none: browsers' scripts of other origins cannot read answers

    max_body_bytes: int = 8 * 2**20
    max_header_bytes: int = 32 * 2**10  # request line and headers together
    max_messages: int = 2048  # of a chat
    max_prompt_tokens: int | None = None  # None: as many as the model takes
    max_connections: int = 10_000
    max_connections_per_key: int = 4096
    read_s: float = 30.0  # from a request's first byte to its last
    idle_s: float = 75.0  # between two requests on one connection
    write_s: float = 30.0  # a client that takes nothing for so long is disconnected
    keep_alive_s: float = 10.0  # between two comments to a streaming client whose request waits

    log_format: Literal["text", "json"] = "text"
    log_prompts: bool = False  # prompts and answers in the log, for debugging
