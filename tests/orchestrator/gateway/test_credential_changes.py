"""Certificates and keys that change under load: no request of a good client fails."""

from __future__ import annotations

import shutil
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509

from orchestrator.access.keys import KeyFile
from orchestrator.process.home import Home
from tests.fleet import until
from tests.orchestrator.certificates import Authority, Pair
from tests.orchestrator.gateways import LiveGateway, routes
from tests.orchestrator.hostile import Closed, Steady, Wire, ask, post, request
from tests.served import Served

SEEN_S = 1.0  # for a change to be in force


@dataclass
class Secured:
    """A gateway with mutual TLS, and what a client needs for it."""

    gateway: LiveGateway
    authority: Authority
    live: Pair  # the files that the gateway reads
    client: Pair

    def context(self, with_client: bool = True) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.authority.file))
        if with_client:
            context.load_cert_chain(self.client.cert, self.client.key)
        return context

    def serial(self) -> int:
        """Of the certificate that a new connection sees."""
        with Wire(self.gateway.port, tls=self.context()) as wire:
            assert isinstance(wire.socket, ssl.SSLSocket)
            der = wire.socket.getpeercert(binary_form=True)
            assert der is not None
            return x509.load_der_x509_certificate(der).serial_number


def serial_of(pair: Pair) -> int:
    return x509.load_pem_x509_certificate(pair.cert.read_bytes()).serial_number


@pytest.fixture
def served() -> Iterator[Served]:
    replica = Served(slots=8)
    yield replica
    replica.close()


@pytest.fixture
def secured(served: Served, tmp_path: Path) -> Iterator[Secured]:
    authority = Authority(tmp_path)
    first = authority.sign("first")
    live = Pair(tmp_path / "live.pem", tmp_path / "live-key.pem")
    shutil.copy(first.cert, live.cert)
    shutil.copy(first.key, live.key)
    gateway = LiveGateway(tls_cert=str(live.cert), tls_key=str(live.key), tls_client_ca=str(authority.file))
    gateway.serve(routes("m", served))
    yield Secured(gateway, authority, live, authority.sign("client", client=True))
    gateway.close()


@pytest.mark.slow
def test_certificates_are_replaced_under_load_without_a_failed_request(secured: Secured) -> None:
    """Five times, the certificate before its key, once incompletely written: clients on open and new connections
    are served all the time, and new ones get the new certificate.
    """
    context = secured.context()
    with Steady(secured.gateway.port, clients=4, tls=lambda: context) as steady:
        for number in range(5):
            before = secured.serial()
            pair = secured.authority.sign(f"next-{number}")
            whole = pair.cert.read_bytes()
            secured.live.cert.write_bytes(whole[: len(whole) // 2])
            until_seen(secured, steady)
            assert secured.serial() == before
            secured.live.cert.write_bytes(whole)  # which does not fit the old key
            until_seen(secured, steady)
            assert secured.serial() == before
            if number % 2:
                pair.key.rename(secured.live.key)
            else:
                secured.live.key.write_bytes(pair.key.read_bytes())
            began = time.monotonic()
            until(lambda before=before: secured.serial() != before, 5, "the new certificate is seen")  # type: ignore[misc]
            assert time.monotonic() - began < SEEN_S
            assert secured.serial() == serial_of(pair)
            steady.wait_answered(20)
    assert steady.wrong == []
    assert steady.counts["exact"] > 200


def until_seen(secured: Secured, steady: Steady) -> None:
    """Until the gateway has looked at the files, twice."""
    ends = time.monotonic() + 0.6
    while time.monotonic() < ends:
        steady.wait_answered(5)


def test_a_client_without_a_certificate_gets_no_response(secured: Secured) -> None:
    """With mutual TLS no HTTP is exchanged with a client without a certificate of our authority."""
    stranger = Authority(secured.authority.folder, "stranger").sign("stranger-client", client=True)
    foreign = secured.context(with_client=False)
    foreign.load_cert_chain(stranger.cert, stranger.key)
    for context in (secured.context(with_client=False), foreign):
        with pytest.raises((Closed, ConnectionError, ssl.SSLError)):
            ask(secured.gateway.port, request("GET", "/livez"), tls=context)
    assert ask(secured.gateway.port, request("GET", "/livez"), tls=secured.context()).status == 200


@pytest.mark.slow
def test_keys_are_replaced_under_load_without_a_failed_request(served: Served) -> None:
    """Twenty keys are created and revoked while others are in use: the others never fail, a new one is valid within
    a second, and a revoked one is rejected within a second, on new connections and on open ones.
    """
    gateway = LiveGateway()
    try:
        gateway.serve(routes("m", served))
        keys = KeyFile(Home(gateway.home).keys)
        _, steady_key = keys.create("steady")
        until(lambda: ask(gateway.port, request("GET", "/v1/models")).status == 401, 5, "keys are required")
        with Steady(gateway.port, clients=4, key=steady_key) as steady:
            for number in range(20):
                _, text = keys.create(f"key-{number}")
                data = post({"model": "m", "prompt": "x", "max_tokens": 2}, x_api_key=text)
                with Wire(gateway.port) as kept:

                    def status(kept: Wire = kept, data: bytes = data) -> int:
                        kept.send(data)
                        return kept.answer().status

                    began = time.monotonic()
                    until(lambda status=status: status() == 200, 5, "the new key is good")  # type: ignore[misc]
                    assert time.monotonic() - began < SEEN_S
                    assert ask(gateway.port, data).status == 200

                    keys.revoke(f"key-{number}")
                    began = time.monotonic()
                    until(lambda status=status: status() == 401, 5, "the revoked key is refused")  # type: ignore[misc]
                    assert time.monotonic() - began < SEEN_S
                    assert ask(gateway.port, data).status == 401
                steady.wait_answered(5)
        assert steady.wrong == []
        assert steady.counts["exact"] >= 100
    finally:
        gateway.close()


@pytest.mark.slow
def test_a_stream_outlives_the_certificate_of_its_connection(secured: Secured, served: Served) -> None:
    with Wire(secured.gateway.port, tls=secured.context()) as wire:
        wire.send(post({"model": "m", "prompt": "x", "max_tokens": 4000, "stream": True}))
        wire.read_until(b"data: ")
        before = secured.serial()
        pair = secured.authority.sign("next")
        pair.key.rename(secured.live.key)
        pair.cert.rename(secured.live.cert)
        until(lambda: secured.serial() != before, 5, "the new certificate is seen")
        assert wire.read_until(b"[DONE]")
    assert served.batcher.stats.failed is None
