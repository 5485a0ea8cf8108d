"""Checksums of S3: which is taken, and that ranges in any order give it."""

from __future__ import annotations

import base64
import hashlib
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.artifacts.sources.checksums import CRC_BYTES, FIELDS, Checksum, checksum_of, combined, crc_of, digest

CONTENT = bytes(range(256)) * 40
ALGORITHMS = [*FIELDS, "md5"]


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_crcs_have_their_published_check_values() -> None:
    """Of the text "123456789"."""
    result = {name: crc_of(name)(b"123456789", 0) for name in CRC_BYTES}
    assert result == {"crc64nvme": 0xAE8B14860A799888, "crc32c": 0xE3069283, "crc32": zlib.crc32(b"123456789")}


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=6), st.sampled_from(list(CRC_BYTES)))
def test_crcs_of_ranges_combine_to_the_crc_of_the_whole(ranges: list[bytes], algorithm: str) -> None:
    """However the object is split."""
    parts = [digest(algorithm, data) for data in ranges]
    assert combined(algorithm, parts, [len(data) for data in ranges]) == digest(algorithm, b"".join(ranges))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("cuts", [[len(CONTENT)], [4000, 4000, 2240]])
@pytest.mark.parametrize("composite", [True, False, None])
def test_a_checksum_fits_only_its_content(algorithm: str, cuts: list[int], composite: bool | None) -> None:
    """A checksum of the whole object or of its parts, also if S3 does not say which."""
    ranges = [CONTENT[sum(cuts[:i]) : sum(cuts[: i + 1])] for i in range(len(cuts))]
    parts = [digest(algorithm, data) for data in ranges]
    if composite is not True and len(cuts) > 1 and algorithm not in CRC_BYTES:
        return  # hashes of parts do not combine: such an object is hashed as one part
    value = digest(algorithm, b"".join(parts)) if composite else digest(algorithm, CONTENT)
    checksum = Checksum(algorithm=algorithm, value=value, composite=composite)
    damaged = [digest(algorithm, ranges[0][:-1] + b"?"), *parts[1:]]
    assert (checksum.fits(parts, cuts), checksum.fits(damaged, cuts)) == (True, False)


MD5 = hashlib.md5(CONTENT).hexdigest()
SHA = base64_of(hashlib.sha256(CONTENT).digest())
CRC = base64_of(digest("crc32c", CONTENT))


@pytest.mark.parametrize(
    ("head", "algorithm", "composite", "parts"),
    [
        ({"ETag": f'"{MD5}"'}, "md5", False, 1),
        ({"ETag": f'"{MD5}-3"'}, "md5", True, 3),
        ({"ETag": f'"{MD5}"', "ServerSideEncryption": "AES256"}, "md5", False, 1),
        ({"ETag": f'"{MD5}"', "ServerSideEncryption": "aws:kms"}, None, None, 1),
        ({"ETag": f'"{MD5}"', "ServerSideEncryption": "aws:kms:dsse"}, None, None, 1),
        ({"ETag": f'"{MD5}"', "SSECustomerAlgorithm": "AES256"}, None, None, 1),
        ({"ETag": '"an-etag-of-a-directory-bucket"'}, None, None, 1),
        ({"ETag": f'"{MD5}"', "ChecksumSHA256": SHA}, "sha256", False, 1),
        ({"ETag": f'"{MD5}-2"', "ChecksumSHA256": f"{SHA}-2"}, "sha256", True, 2),
        ({"ETag": f'"{MD5}-2"', "ChecksumCRC32C": CRC, "ChecksumType": "FULL_OBJECT"}, "crc32c", False, 2),
        ({"ETag": f'"{MD5}-2"', "ChecksumCRC32C": f"{CRC}-2", "ChecksumType": "COMPOSITE"}, "crc32c", True, 2),
        ({"ETag": f'"{MD5}-2"', "ChecksumCRC32C": CRC}, "crc32c", None, 2),
        ({"ETag": f'"{MD5}"', "ChecksumSHA256": SHA, "ChecksumCRC32C": CRC}, "crc32c", False, 1),
        ({"ETag": f'"{MD5}"', "ChecksumCRC32C": "no base64!"}, "md5", False, 1),
    ],
)
def test_the_best_checksum_of_an_object_is_used(
    head: dict[str, str], algorithm: str, composite: bool | None, parts: int
) -> None:
    """CRCs before hashes, S3's own before the ETag, and only ETags that are MD5s."""
    checksum, count = checksum_of(head)
    assert count == parts
    assert (checksum and checksum.algorithm, checksum and checksum.composite) == (algorithm, composite)
