"""The certificate authority of one fleet, created by `up`, which issues the certificates of the data plane.

It signs one certificate for the gateways and one for the replicas; its own private key is then discarded.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from workers.messages.credentials import GATEWAY, REPLICA, Credentials

LIFE = datetime.timedelta(days=3650)  # longer than any fleet runs; each `up` creates a new authority
SKEW = datetime.timedelta(days=1)  # tolerated difference between the clocks of hosts


@dataclass(frozen=True)
class FleetCredentials:
    """The credentials of both sides of the data plane."""

    gateway: Credentials
    replica: Credentials


def fleet_credentials(life: datetime.timedelta = LIFE) -> FleetCredentials:
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
        builder = builder.not_valid_before(min(now, ends) - SKEW).not_valid_after(ends)
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
