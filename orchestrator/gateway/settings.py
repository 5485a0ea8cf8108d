"""The settings that `up` passes to each gateway of the fleet."""

from __future__ import annotations

from typing import Literal

import msgspec

from orchestrator.process.home import WILDCARDS

DRAIN_S = 20.0  # for the answers of a gateway that another one replaces


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one gateway. Every limit is per gateway. Sizes in bytes, times in seconds."""

    host: str = "127.0.0.1"
    port: int = 8080
    home: str  # folder of keys, logs and sockets
    machine: str = ""  # that it runs on: the address of its Ray node
    place: str = ""  # the label of its machine on a joined cluster; empty: beside the controller, whose home it shares
    fleet: str = ""  # the fleet's id
    gateways: int = 1  # processes that share the port
    gateway_spare: bool = True  # one more, which replaces a dead gateway at once
    tokenizers: bool = True  # a model needs one: the process that loads them starts with the gateway

    insecure: bool = False  # serve without keys, on any address
    tls_cert: str | None = None  # PEM files
    tls_key: str | None = None
    tls_client_ca: str | None = None  # require client certificates signed by one of these authorities
    cors_origins: tuple[str, ...] = ()  # none: browser scripts of other origins cannot read answers

    max_body_bytes: int = 8 * 2**20
    max_header_bytes: int = 32 * 2**10  # request line and headers together
    max_messages: int = 2048  # of a chat
    max_prompt_tokens: int | None = None  # None: the model's own limit
    max_connections: int = 10_000
    max_connections_per_key: int = 4096
    read_s: float = 30.0  # from a request's first byte to its last
    idle_s: float = 75.0  # between two requests on one connection
    write_s: float = 30.0  # a client that reads nothing for this long is disconnected
    keep_alive_s: float = 10.0  # between two comments to a streaming client while its request waits

    sagemaker: bool = False  # in a container of SageMaker, which loads and unloads models: see sagemaker.md

    log_format: Literal["text", "json"] = "text"
    log_prompts: bool = False  # log prompts and answers, for debugging

    @property
    def url(self) -> str:
        """The address of this gateway for clients; on its own machine if it listens on loopback only."""
        host = (self.machine or WILDCARDS[self.host]) if self.host in WILDCARDS else self.host
        return f"{'http' if self.tls_cert is None else 'https'}://{f'[{host}]' if ':' in host else host}:{self.port}"
