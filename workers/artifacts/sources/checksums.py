"""Checksums of S3 objects, computed from ranges that arrive in any order."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

CRC_BYTES = {"crc64nvme": 8, "crc32c": 4, "crc32": 4}  # CRCs of adjacent ranges can be combined
# Names in HeadObject, the cheapest first: on one core 40, 26, 2.3, 1.6, 1.5 GB/s (awscrt and hashlib).
FIELDS = {
    "crc64nvme": "ChecksumCRC64NVME",
    "crc32c": "ChecksumCRC32C",
    "crc32": "ChecksumCRC32",
    "sha1": "ChecksumSHA1",
    "sha256": "ChecksumSHA256",
}
MD5 = re.compile(r"[0-9a-f]{32}")
MULTIPART = re.compile(r"([0-9a-f]{32})-(\d+)")
OF_RANGES = "crc32c"  # for ranges if S3's algorithm cannot be combined


class Checksum(msgspec.Struct, frozen=True, kw_only=True):
    """The checksum of one object as S3 reports it."""

    algorithm: str  # of FIELDS, or md5
    value: bytes
    composite: bool | None  # a checksum of the concatenated part checksums; None: S3 does not say

    @property
    def combines(self) -> bool:
        return self.algorithm in CRC_BYTES

    def fits(self, parts: Sequence[bytes], sizes: Sequence[int]) -> bool:
        """Returns whether an object whose parts have these digests and sizes matches."""
        candidates = []
        if self.composite is not False:
            candidates.append(digest(self.algorithm, b"".join(parts)))
        if self.composite is not True and (self.combines or len(parts) == 1):
            candidates.append(combined(self.algorithm, parts, sizes) if self.combines else parts[0])
        return self.value in candidates


class Hash(Protocol):
    """A hashlib hash object."""

    def update(self, data: bytes | memoryview, /) -> Any: ...
    def digest(self) -> bytes: ...


def checksum_of(head: Mapping[str, Any]) -> tuple[Checksum | None, int]:
    """Returns the best checksum in a HeadObject response (with ChecksumMode), and the number of uploaded parts.

    None: no usable checksum. The ETag is the MD5 of the content, or of its parts' MD5s, except with KMS or
    customer-provided encryption keys, and in directory buckets, whose ETags have another format.
    """
    tag = str(head.get("ETag", "")).strip('"')
    multipart = MULTIPART.fullmatch(tag)
    parts = int(multipart[2]) if multipart else int(head.get("PartsCount") or 1)
    for algorithm, field in FIELDS.items():
        if value := head.get(field):
            base, _, count = str(value).partition("-")
            kind = head.get("ChecksumType")
            composite = True if count or kind == "COMPOSITE" else False if kind or parts == 1 else None
            if (data := _decoded(base)) is not None:
                return Checksum(algorithm=algorithm, value=data, composite=composite), int(count or parts)
    hidden = head.get("SSECustomerAlgorithm") or str(head.get("ServerSideEncryption", "")).startswith("aws:kms")
    if hidden or not (multipart or MD5.fullmatch(tag)):
        return None, parts
    value = bytes.fromhex(multipart[1] if multipart else tag)
    return Checksum(algorithm="md5", value=value, composite=multipart is not None), parts


def _decoded(text: str) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return None


def crc_of(algorithm: str) -> Callable[[Any, int], int]:
    """Returns the CRC function: of bytes, continuing the CRC of those before them (0: none)."""
    from awscrt import checksums  # type: ignore[import-untyped]

    function: Callable[[Any, int], int] = getattr(checksums, algorithm)
    return function


def combined(algorithm: str, parts: Sequence[bytes], sizes: Sequence[int]) -> bytes:
    """Returns the CRC of the concatenated parts from the CRCs of the parts."""
    from awscrt import checksums

    combine: Callable[[int, int, int], int] = getattr(checksums, f"combine_{algorithm}")
    crc = 0
    for part, size in zip(parts, sizes, strict=True):
        crc = combine(crc, int.from_bytes(part, "big"), size)
    return crc.to_bytes(CRC_BYTES[algorithm], "big")


def hash_of(algorithm: str) -> Hash:
    """Returns a new hash object of an algorithm that cannot be combined."""
    return hashlib.new(algorithm, usedforsecurity=False)


def digest(algorithm: str, data: bytes) -> bytes:
    if algorithm in CRC_BYTES:
        return crc_of(algorithm)(data, 0).to_bytes(CRC_BYTES[algorithm], "big")
    hashed = hash_of(algorithm)
    hashed.update(data)
    return hashed.digest()
