"""TLS of the gateway: only what works is taken, what changes is taken over, and a half written pair is not."""

from __future__ import annotations

import logging
import shutil
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import pytest

from orchestrator.access import tls
from orchestrator.access.tls import CertificateFiles, certified_name
from orchestrator.cluster.gateway_start import gateway_url
from orchestrator.gateway.settings import GatewaySettings
from orchestrator.process.failure import Failed
from tests.orchestrator.certificates import Authority, Pair


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder)


@pytest.fixture
def pair(authority: Authority, tmp_path: Path) -> Pair:
    """A good one, in files of its own."""
    made = authority.sign("server")
    return Pair(*(Path(shutil.copy(file, tmp_path / file.name)) for file in (made.cert, made.key)))


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[str, str | None, bytes]:
    """Of two ends in this process: the version, the protocol, and what the client reads. Raises SSLError."""
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    theirs.settimeout(10)

    def serve() -> None:
        try:
            with server.wrap_socket(ours, server_side=True) as end:
                end.sendall(b"well")
        except (ssl.SSLError, OSError):
            ours.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(theirs, server_hostname="localhost") as end:
            return end.version() or "", end.selected_alpn_protocol(), end.recv(4)
    finally:
        theirs.close()
        thread.join(10)


def read(server: ssl.SSLContext, client: ssl.SSLContext) -> bytes:
    """What the client reads; nothing where it is refused."""
    try:
        return handshake(server, client)[2]
    except OSError:  # of which TLS's are some
        return b""


def trusting(authority: Authority, pair: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.file))
    context.set_alpn_protocols(["h2", "http/1.1"])
    if pair is not None:
        context.load_cert_chain(pair.cert, pair.key)
    return context


def test_a_client_of_the_authority_is_served(authority: Authority, pair: Pair) -> None:
    """With TLS 1.3 and HTTP/1.1, whatever else it offers."""
    version = handshake(CertificateFiles(str(pair.cert), str(pair.key)).context, trusting(authority))
    assert version == ("TLSv1.3", "http/1.1", b"well")


def test_old_versions_are_not_spoken(authority: Authority, pair: Pair) -> None:
    """1.2 is the oldest."""
    context = CertificateFiles(str(pair.cert), str(pair.key)).context
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    client = trusting(authority)
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    assert handshake(context, client)[0] == "TLSv1.2"


def test_with_an_authority_for_clients_only_its_clients_are_served(
    authority: Authority, pair: Pair, folder: Path
) -> None:
    """None without a certificate, of another authority, or with a server's certificate."""
    server = CertificateFiles(str(pair.cert), str(pair.key), str(authority.file)).context
    other = Authority(folder, "other")
    assert handshake(server, trusting(authority, authority.sign("client", client=True)))[2] == b"well"
    strangers = [None, other.sign("stranger", client=True), authority.sign("no-client")]
    for stranger in (*strangers, authority.sign("late-client", client=True, days=-1)):
        assert read(server, trusting(authority, stranger)) == b""


def unusable(cert: Path, key: Path, client_ca: Path | None = None) -> str:
    with pytest.raises(Failed) as raised:
        CertificateFiles(str(cert), str(key), None if client_ca is None else str(client_ca))
    assert raised.value.problem.id == "tls-unusable"
    return raised.value.problem.what


def test_an_unusable_file_is_reported(authority: Authority, pair: Pair, tmp_path: Path) -> None:
    """With its path and the reason, and without a password prompt."""
    other, late = authority.sign("other-server"), authority.sign("late", days=-1)
    closed = authority.sign("closed", password=b"x")
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    assert unusable(tmp_path / "none.pem", pair.key) == f"{tmp_path}/none.pem cannot be read: No such file or directory"
    assert "none.pem cannot be read" in unusable(pair.cert, tmp_path / "none.pem")
    assert unusable(pair.cert, other.key) == f"{other.key} is not the key of {pair.cert}"
    assert unusable(text, pair.key) == f"{text} contains no certificate"
    assert "hold" in unusable(pair.cert, text) or "cannot be used" in unusable(pair.cert, text)
    assert f"{late.cert} expired on " in unusable(late.cert, late.key)
    assert (
        unusable(closed.cert, closed.key) == f"{closed.key} is encrypted, and a server cannot prompt for its password"
    )
    assert f"{text} contains no certificate" in unusable(pair.cert, pair.key, text)
    assert "none.pem cannot be read" in unusable(pair.cert, pair.key, tmp_path / "none.pem")


def test_a_renewed_certificate_is_loaded(authority: Authority, pair: Pair) -> None:
    """In a new context, so that open connections keep theirs; unchanged files give none."""
    files = CertificateFiles(str(pair.cert), str(pair.key))
    before = files.context
    assert files.renewed() is None
    fresh, ended = authority.sign("renewed", days=10), files.expires
    shutil.copy(fresh.key, pair.key)
    shutil.copy(fresh.cert, pair.cert)
    assert files.renewed() is files.context is not before
    assert files.expires == pytest.approx(ended - 20 * 86_400, abs=60)  # what the metrics tell is of the new one
    assert files.renewed() is None
    assert handshake(files.context, trusting(authority))[2] == b"well"


def test_an_incomplete_pair_keeps_the_old_one(
    authority: Authority, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """This is logged once for each change, and the second file activates the new pair."""
    files = CertificateFiles(str(pair.cert), str(pair.key))
    before, fresh = files.context, authority.sign("half")
    with caplog.at_level(logging.ERROR):
        shutil.copy(fresh.cert, pair.cert)
        assert files.renewed() is None
        assert files.renewed() is None
        assert [record.message.split(":")[0] for record in caplog.records] == ["tls-unusable"]
        pair.cert.unlink()
        assert files.renewed() is None
        assert files.renewed() is None
        assert len(caplog.records) == 2
    assert files.context is before
    shutil.copy(fresh.cert, pair.cert)
    shutil.copy(fresh.key, pair.key)
    assert files.renewed() is files.context is not before


def test_files_that_change_during_the_read_are_read_again(
    authority: Authority, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be of two writes; the next check has the last one."""
    files, fresh = CertificateFiles(str(pair.cert), str(pair.key)), authority.sign("fresh")
    before = files.context

    loaded = tls._loaded

    def interrupted(cert: str, key: str, client_ca: str | None) -> tuple[ssl.SSLContext, float]:
        context = loaded(cert, key, client_ca)
        pair.cert.touch()
        return context

    shutil.copy(fresh.cert, pair.cert)
    shutil.copy(fresh.key, pair.key)
    with monkeypatch.context() as patched:
        patched.setattr(tls, "_loaded", interrupted)
        assert files.renewed() is None
    assert files.context is before
    assert files.renewed() is files.context is not before


def test_a_redirected_link_is_a_change(authority: Authority, pair: Pair, tmp_path: Path) -> None:
    """As Kubernetes replaces a secret: both files at once."""
    fresh = authority.sign("linked")
    for name, certificate in (("old", pair), ("new", fresh)):
        (tmp_path / name).mkdir()
        shutil.copy(certificate.cert, tmp_path / name / "cert.pem")
        shutil.copy(certificate.key, tmp_path / name / "key.pem")
    current = tmp_path / "current"
    current.symlink_to("old")
    files = CertificateFiles(str(current / "cert.pem"), str(current / "key.pem"))
    (tmp_path / "next").symlink_to("new")
    (tmp_path / "next").rename(current)
    assert files.renewed() is not None


@pytest.mark.parametrize(
    ("hosts", "name"),
    [
        (["*.example.com", "fleet.example.com", "localhost"], "fleet.example.com"),
        (["*.example.com", "192.0.2.7"], "192.0.2.7"),
        (["*.example.com"], "localhost"),
    ],
)
def test_a_certificate_has_the_name_of_its_server(authority: Authority, hosts: list[str], name: str) -> None:
    """The first name that is a single host."""
    assert certified_name(str(authority.sign("named", hosts=hosts).cert)) == name


@pytest.mark.parametrize(
    ("host", "with_tls", "url"),
    [
        ("0.0.0.0", True, "https://fleet.example:8443"),
        ("::", True, "https://fleet.example:8443"),
        ("192.0.2.7", True, "https://192.0.2.7:8443"),
        ("0.0.0.0", False, "http://0.0.0.0:8443"),
        ("::1", False, "http://[::1]:8443"),
    ],
)
def test_the_address_printed_by_up_matches_its_certificate(
    authority: Authority, host: str, with_tls: bool, url: str
) -> None:
    """No certificate is for 0.0.0.0."""
    pair = authority.sign("everywhere", hosts=["fleet.example"])
    files: dict[str, Any] = {"tls_cert": str(pair.cert), "tls_key": str(pair.key)} if with_tls else {}
    assert gateway_url(GatewaySettings(host=host, port=8443, home="", **files)) == url
