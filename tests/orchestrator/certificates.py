"""Certificates that a test makes itself: authorities, and what they sign."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """The PEM files of one certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """One that signs what it is asked to. Its certificate is at ``file``."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self.folder = folder
        self.file = folder / f"{name}.pem"
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.timezone.utc)
        made = (
            x509.CertificateBuilder(self._name, self._name, self._key.public_key(), x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + 30 * DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .add_extension(
                x509.KeyUsage(False, False, False, False, False, True, True, False, False),
                critical=True,
            )
            .sign(self._key, hashes.SHA256())
        )
        self.file.write_bytes(made.public_bytes(serialization.Encoding.PEM))

    def sign(
        self,
        name: str,
        *,
        days: float = 30,
        client: bool = False,
        peer: bool = False,
        password: bytes | None = None,
        hosts: Sequence[str] = ("localhost", "127.0.0.1"),
    ) -> Pair:
        """A certificate for ``hosts``, names and addresses; ``days`` below 0 is one that has expired. ``peer``: for
        both sides of a connection."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.timezone.utc)
        ends = now + days * DAY
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH] if client or peer else []
        purposes += [] if client else [ExtendedKeyUsageOID.SERVER_AUTH]
        names = [
            x509.IPAddress(ipaddress.ip_address(host)) if host[-1:].isdigit() else x509.DNSName(host) for host in hosts
        ]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = (
            x509.CertificateBuilder(self._name, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(min(now, ends) - DAY)
            .not_valid_after(ends)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pair = Pair(self.folder / f"{name}.pem", self.folder / f"{name}-key.pem")
        pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        closed = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        pair.cert.write_bytes(made.public_bytes(pem))
        pair.key.write_bytes(key.private_bytes(pem, form, closed))
        return pair
