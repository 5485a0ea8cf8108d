"""TLS credentials for the data plane between hosts: certificates issued by the fleet's own authority."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import ssl

GATEWAY = "corewright-gateway"
REPLICA = "corewright-replica"  # the name that a gateway expects in a replica's certificate


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """One side's certificate and key, and the authority that must have issued the peer's certificate. PEM.

    They are passed to other processes by Ray and are never written to a file.
    """

    certificate: str
    key: str
    authority: str

    def __repr__(self) -> str:
        return "Credentials(...)"  # keeps the key out of logs


@lru_cache(maxsize=4)
def server_context(own: Credentials) -> ssl.SSLContext:
    """Returns a replica's context: every peer needs a client certificate of the authority."""
    import ssl  # takes 10 ms, which CLI commands avoid

    context = _context(ssl.PROTOCOL_TLS_SERVER, own)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


@lru_cache(maxsize=4)
def client_context(own: Credentials) -> ssl.SSLContext:
    """Returns a gateway's context: the peer must be a replica of the authority. For ``server_hostname=REPLICA``."""
    import ssl

    context = _context(ssl.PROTOCOL_TLS_CLIENT, own)
    context.check_hostname = True
    return context


def _context(protocol: int, own: Credentials) -> ssl.SSLContext:
    import ssl

    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=own.authority)
    descriptor = os.memfd_create("credentials", os.MFD_CLOEXEC)  # ssl loads keys only from files
    try:
        os.write(descriptor, f"{own.certificate}\n{own.key}".encode())
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context
