"""TLS of the gateway: certificates that are read from files, checked, and read again when the files change."""

from __future__ import annotations

import datetime
import logging
import ssl
from pathlib import Path

from orchestrator.process.failure import Failed

log = logging.getLogger(__name__)


def server_context(cert: str, key: str, client_ca: str | None = None) -> ssl.SSLContext:
    """What a listener speaks TLS with, 1.2 and above. With ``client_ca`` every client needs a certificate that one of
    these authorities has signed.

    ``cert`` is PEM: the server's own certificate first, then those between it and its authority. Raises Failed
    `tls-unusable` with the file and what is wrong with it.
    """
    return _loaded(cert, key, client_ca)[0]


def _loaded(cert: str, key: str, client_ca: str | None) -> tuple[ssl.SSLContext, float]:
    """The context, and when its certificate ends, in seconds since the epoch."""
    pem = _read(cert, "--tls-cert")
    _read(key, "--tls-key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    ends = _expiry(cert, pem)
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        what = {
            "KEY_VALUES_MISMATCH": f"{key} is not the key of {cert}",
            "NO_START_LINE": f"{cert} or {key} holds no PEM",
        }.get(error.reason or "", f"{cert} and {key} cannot be used: {error.reason or error}")
        raise Failed("tls-unusable", what, "PEM files: the certificate with its chain, and its key") from None
    except _Encrypted:
        what = f"{key} is encrypted, and there is nobody to ask for its password"
        raise Failed("tls-unusable", what, f"openssl pkey -in {key} writes it in the clear; chmod 600") from None
    except OSError as error:  # gone since
        raise Failed("tls-unusable", f"{cert} or {key} cannot be read: {error.strerror}", "") from None
    if client_ca is not None:
        _demand_clients(context, client_ca)
    return context, ends


def _demand_clients(context: ssl.SSLContext, client_ca: str) -> None:
    _read(client_ca, "--tls-client-ca")
    try:
        context.load_verify_locations(client_ca)
    except (ssl.SSLError, OSError) as error:
        what = f"{client_ca} holds no certificates: {getattr(error, 'reason', None) or error}"
        raise Failed("tls-unusable", what, "PEM: the authorities that sign the clients' certificates") from None
    if not context.get_ca_certs():
        what = f"{client_ca} holds no certificate of an authority"
        raise Failed("tls-unusable", what, "PEM: the authorities that sign the clients' certificates")
    context.verify_mode = ssl.CERT_REQUIRED


def _read(path: str, option: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise Failed("tls-unusable", f"{path} cannot be read: {error.strerror}", f"{option} names it") from None


class _Encrypted(Exception):
    """The key asks for a password."""


def _no_password() -> str:
    raise _Encrypted  # else OpenSSL would ask on the terminal


def _expiry(path: str, pem: bytes) -> float:
    """When the certificate ends, in seconds since the epoch. One that has expired would make every client refuse: that
    is told here, not by them."""
    from cryptography import x509

    try:
        own = x509.load_pem_x509_certificate(pem)
    except ValueError:
        what = f"{path} holds no certificate"
        raise Failed("tls-unusable", what, "PEM: the server's own certificate first") from None
    now = datetime.datetime.now(datetime.timezone.utc)
    if now >= own.not_valid_after_utc:
        what = f"{path} has expired on {own.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        raise Failed("tls-unusable", what, "renew it")
    return own.not_valid_after_utc.timestamp()


def certified_name(cert: str) -> str:
    """By which clients may call a server with this certificate: its first host name that is no pattern, else its first
    address, else "localhost". Raises Failed `tls-unusable`."""
    from cryptography import x509

    try:
        own = x509.load_pem_x509_certificate(_read(cert, "--tls-cert"))
        names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return "localhost"
    hosts = [name for name in names.get_values_for_type(x509.DNSName) if "*" not in name]
    return next(iter([*hosts, *map(str, names.get_values_for_type(x509.IPAddress))]), "localhost")


class CertificateFiles:
    """The listener's certificates: ``context`` is what new connections are served with, until ``expires`` (seconds
    since the epoch)."""

    def __init__(self, cert: str, key: str, client_ca: str | None = None) -> None:
        """Raises Failed as ``server_context``."""
        self._files = (cert, key, client_ca)
        self._seen = self._stat()
        self.context, self.expires = _loaded(cert, key, client_ca)

    def renewed(self) -> ssl.SSLContext | None:
        """The context of the files as they are by now, when they have changed since the last question and are good;
        else None. Costs a `stat` of each file where nothing has changed.

        A pair that is half written, or wrong, leaves the old one in use, and that is logged once for each change.
        """
        seen = self._stat()
        if seen == self._seen:
            return None
        self._seen = seen
        try:
            context, expires = _loaded(*self._files)
        except Failed as failed:
            log.error("%s; the certificate that was read before stays in use", failed)
            return None
        if self._stat() != seen:  # written in the midst of the reading: the next question reads them again
            self._seen = ()
            return None
        self.context, self.expires = context, expires
        log.info("the certificate %s is in use now", self._files[0])
        return context

    def _stat(self) -> tuple[object, ...]:
        """Of what the paths lead to: a link that is pointed elsewhere is a change too."""
        found: list[object] = []
        for path in self._files:
            try:
                status = None if path is None else Path(path).stat()
            except OSError:
                status = None
            found.append(status and (status.st_mtime_ns, status.st_size, status.st_ino, status.st_dev))
        return tuple(found)
