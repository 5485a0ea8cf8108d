"""Who a gateway and a replica are to each other on another host: certificates of an authority that one fleet has."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import ssl

GATEWAY = "corewright-gateway"
REPLICA = "corewright-replica"  # the name that a gateway looks for in a replica's certificate


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """One side's certificate and key, and the authority that the other side's must be of. PEM.

    They cross processes by Ray, and are written to no file.
    """

    certificate: str
    key: str
    authority: str

    def __repr__(self) -> str:
        return "Credentials(...)"  # a key must not get into a log by way of a value that holds it


@lru_cache(maxsize=4)
def server_context(own: Credentials) -> ssl.SSLContext:
    """A replica's: every peer needs a certificate of the authority that is meant for a client."""
    import ssl  # 10 ms, which a command need not wait for

    context = _context(ssl.PROTOCOL_TLS_SERVER, own)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


@lru_cache(maxsize=4)
def client_context(own: Credentials) -> ssl.SSLContext:
    """A gateway's: the peer must be a replica of the authority. To be used with ``server_hostname=REPLICA``."""
    import ssl

    context = _context(ssl.PROTOCOL_TLS_CLIENT, own)
    context.check_hostname = True
    return context


def _context(protocol: int, own: Credentials) -> ssl.SSLContext:
    import ssl

    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=own.authority)
    descriptor = os.memfd_create("credentials", os.MFD_CLOEXEC)  # the ssl module reads a key from a file only
    try:
        os.write(descriptor, f"{own.certificate}\n{own.key}".encode())
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context
