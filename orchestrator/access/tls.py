"""TLS of the gateway: certificates are read from files, validated, and reloaded when the files change."""

from __future__ import annotations

import datetime
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

from orchestrator.process.failure import Failed
from workers.messages.credentials import GATEWAY, REPLICA, Credentials

log = logging.getLogger(__name__)

_CLIENT_CA_HINT = "use a PEM file with the authorities that sign the clients' certificates"
AUTHORITY_LIFE = datetime.timedelta(days=3650)  # longer than any fleet runs; each `up` creates a new authority
MAX_CLOCK_SKEW = datetime.timedelta(days=1)  # tolerated difference between the clocks of hosts


def _loaded(cert: str, key: str, client_ca: str | None) -> tuple[ssl.SSLContext, float]:
    """Returns the TLS context of a listener, TLS 1.2 and above, and the expiry of its certificate, in seconds since the
    epoch. With ``client_ca`` each client needs a certificate that one of these authorities has signed.

    ``cert`` is PEM: the server's own certificate first, then the intermediate ones. Raises Failed `tls-unusable` with
    the file and what is wrong with it.
    """
    pem = _read(cert, "--tls-cert")
    _read(key, "--tls-key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    expires = _expiry(cert, pem)
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        message = {
            "KEY_VALUES_MISMATCH": f"{key} is not the key of {cert}",
            "NO_START_LINE": f"{cert} or {key} is not a PEM file",
        }.get(error.reason or "", f"{cert} and {key} cannot be used: {error.reason or error}")
        hint = "use PEM files: the certificate with its chain, and its private key"
        raise Failed("tls-unusable", message, hint) from None
    except _Encrypted:
        message = f"{key} is encrypted, and a server cannot prompt for its password"
        raise Failed("tls-unusable", message, f"decrypt it with: openssl pkey -in {key}; then chmod 600") from None
    except OSError as error:  # deleted meanwhile
        raise Failed("tls-unusable", f"{cert} or {key} cannot be read: {error.strerror}", "") from None
    if client_ca is not None:
        _require_client_certificates(context, client_ca)
    return context, expires


def _require_client_certificates(context: ssl.SSLContext, client_ca: str) -> None:
    _read(client_ca, "--tls-client-ca")
    try:
        context.load_verify_locations(client_ca)
    except (ssl.SSLError, OSError) as error:
        message = f"{client_ca} contains no certificates: {getattr(error, 'reason', None) or error}"
        raise Failed("tls-unusable", message, _CLIENT_CA_HINT) from None
    if not context.get_ca_certs():
        message = f"{client_ca} contains no CA certificate"
        raise Failed("tls-unusable", message, _CLIENT_CA_HINT)
    context.verify_mode = ssl.CERT_REQUIRED


def _read(path: str, option: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        hint = f"check the path that {option} names, and its permissions"
        raise Failed("tls-unusable", f"{path} cannot be read: {error.strerror}", hint) from None


class _Encrypted(Exception):
    """The key needs a password."""


def _no_password() -> str:
    raise _Encrypted  # without this, OpenSSL prompts on the terminal


def _expiry(path: str, pem: bytes) -> float:
    """Returns the expiry of the certificate, in seconds since the epoch. Raises Failed for an expired one, which every
    client would reject."""
    from cryptography import x509

    try:
        own = x509.load_pem_x509_certificate(pem)
    except ValueError:
        message = f"{path} contains no certificate"
        raise Failed("tls-unusable", message, "use a PEM file with the server's own certificate first") from None
    now = datetime.datetime.now(datetime.timezone.utc)
    if now >= own.not_valid_after_utc:
        message = f"{path} expired on {own.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        raise Failed("tls-unusable", message, "renew the certificate")
    return own.not_valid_after_utc.timestamp()


def certified_name(cert: str) -> str:
    """Returns the name by which clients can reach a server with this certificate: its first host name without a
    wildcard, else its first IP address, else "localhost". Raises Failed `tls-unusable`."""
    from cryptography import x509

    try:
        own = x509.load_pem_x509_certificate(_read(cert, "--tls-cert"))
        names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return "localhost"
    hosts = [name for name in names.get_values_for_type(x509.DNSName) if "*" not in name]
    return next(iter([*hosts, *map(str, names.get_values_for_type(x509.IPAddress))]), "localhost")


class CertificateFiles:
    """The certificate files of a listener: ``context`` serves new connections, until ``expires`` (seconds since the
    epoch)."""

    def __init__(self, cert: str, key: str, client_ca: str | None = None) -> None:
        """Raises Failed `tls-unusable`."""
        self._files = (cert, key, client_ca)
        self._seen = self._stat()
        self.context, self.expires = _loaded(cert, key, client_ca)

    def renewed(self) -> ssl.SSLContext | None:
        """Returns a new context if the files have changed since the last call and are valid; else None. Costs one
        `stat` per file if nothing has changed.

        An incomplete or invalid pair leaves the old one in use, which is logged once per change.
        """
        status = self._stat()
        if status == self._seen:
            return None
        self._seen = status
        try:
            context, expires = _loaded(*self._files)
        except Failed as failed:
            log.error("%s; the previous certificate stays in use", failed)
            return None
        if self._stat() != status:  # changed while being read: the next call reads the files again
            self._seen = ()
            return None
        self.context, self.expires = context, expires
        log.info("reloaded the certificate %s", self._files[0])
        return context

    def _stat(self) -> tuple[object, ...]:
        """Returns the status of the files, links resolved: a link with a new target is a change, too."""
        statuses: list[object] = []
        for path in self._files:
            try:
                status = None if path is None else Path(path).stat()
            except OSError:
                status = None
            statuses.append(status and (status.st_mtime_ns, status.st_size, status.st_ino, status.st_dev))
        return tuple(statuses)


@dataclass(frozen=True)
class FleetCredentials:
    """The credentials of both sides of the data plane."""

    gateway: Credentials
    replica: Credentials


def fleet_credentials(life: datetime.timedelta = AUTHORITY_LIFE) -> FleetCredentials:
    """Returns new credentials, signed by a new authority. Takes 1 ms."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = datetime.datetime.now(datetime.timezone.utc)
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "corewright fleet")])
    issuer_key = ec.generate_private_key(ec.SECP256R1())

    def usage(*, signs: bool) -> x509.KeyUsage:
        enciphers = dict.fromkeys(("key_encipherment", "data_encipherment", "encipher_only", "decipher_only"), False)
        others = dict.fromkeys(("content_commitment", "key_agreement", "crl_sign"), False)
        return x509.KeyUsage(digital_signature=not signs, key_cert_sign=signs, **enciphers, **others)

    def unsigned(subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number())
        ends = now + life
        builder = builder.not_valid_before(min(now, ends) - MAX_CLOCK_SKEW).not_valid_after(ends)
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
        builder = builder.add_extension(identifier, critical=False)
        return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)

    authority = unsigned(issuer, issuer_key.public_key())
    authority = authority.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    authority = authority.add_extension(usage(signs=True), critical=True)
    authority_pem = authority.sign(issuer_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()

    def leaf(name: str, purpose: x509.ObjectIdentifier) -> Credentials:
        """Returns a certificate for this purpose only: a replica cannot pose as a gateway."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = unsigned(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key.public_key())
        certificate = certificate.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        certificate = certificate.add_extension(usage(signs=False), critical=True)
        certificate = certificate.add_extension(x509.ExtendedKeyUsage([purpose]), critical=True)
        certificate = certificate.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        encoding = serialization.Encoding.PEM
        form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        return Credentials(
            certificate=certificate.sign(issuer_key, hashes.SHA256()).public_bytes(encoding).decode(),
            key=key.private_bytes(encoding, form, plain).decode(),
            authority=authority_pem,
        )

    gateway = leaf(GATEWAY, ExtendedKeyUsageOID.CLIENT_AUTH)
    return FleetCredentials(gateway=gateway, replica=leaf(REPLICA, ExtendedKeyUsageOID.SERVER_AUTH))
