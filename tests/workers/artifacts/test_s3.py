"""Small requests to S3, against a real server: what is listed, written, and said when S3 says no."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import botocore  # type: ignore[import-untyped]
import obstore
import pytest
from obstore.store import MemoryStore

from tests.s3 import ACCESS_KEY, SECRET_KEY, SESSION_TOKEN, FaultProxy, S3Server, s3_environment
from workers.artifacts.fetch.retry_policy import RetryPolicy
from workers.artifacts.sources.listing import SourceError
from workers.artifacts.sources.s3 import WORK, Bucket, from_obstore, from_response, name_problem

AT_ONCE = RetryPolicy(seconds=0.0)


def failed(work: Callable[[], object]) -> SourceError:
    with pytest.raises(SourceError) as error:
        work()
    return error.value


def test_a_listing_has_all_files_and_no_folder_markers(s3_server: S3Server, s3_proxy: FaultProxy) -> None:
    """More than the thousand of one response, with spaces and special characters."""
    many = dict.fromkeys([f"m/shard/{number:04}" for number in range(1010)], b"")
    odd = {"m/a b/ä%20+&=?#'\"~ 模.txt": b"12", "m/empty": b"", "m2/other": b"", "m": b"", "m/": b"", "m/a b/": b""}
    url = s3_server.bucket(files=odd)
    s3_server.fill(url.removeprefix("s3://"), many)
    result = Bucket.of(f"{url}/m/").files()
    assert [file.name for file in result] == sorted(
        key[2:] for key in {**many, **odd} if key[2:] and key[1:2] == "/" and key[-1] != "/"
    )
    assert [(file.size, file.tag) for file in result if file.name.startswith("a b")] == [
        (2, "c20ad4d76fe97759aa27a0c99bff6710")
    ]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a//b", "has an empty part"),
        ("a/", "has an empty part"),
        ("../b", "leads out of the folder"),
        ("a/./b", "leads out of the folder"),
        ("a\nb", "a control character"),
        ("a\x7fb", "a control character"),
        (f"{WORK}/a", "is reserved"),
        ("ä" * 128, "longer than 255 bytes"),
    ],
)
def test_keys_that_are_not_file_paths_are_detected(name: str, why: str) -> None:
    """They could lead out of the folder."""
    assert (why in name_problem(name), name_problem("a b/ä%+&.safetensors")) == (True, "")


@pytest.mark.parametrize(
    ("key", "why"), [("m/../b", "leads out of the folder"), ("m/a/b/c", "'m/a' is both an object and a folder")]
)
def test_a_listing_with_an_unsafe_key_is_rejected(
    key: str, why: str, s3_server: S3Server, s3_proxy: FaultProxy
) -> None:
    """Before anything is written."""
    url = s3_server.bucket()
    s3_server.fill(url.removeprefix("s3://"), ["m/a", key])
    error = failed(Bucket.of(f"{url}/m").files)
    assert (error.id, why in str(error)) == ("s3-key-unsafe", True), str(error)


@pytest.mark.parametrize("url", ["http://bucket/a", "s3://", "s3:///a", "s3://me:secret@bucket/a", "bucket/a"])
def test_invalid_s3_urls_are_rejected(url: str) -> None:
    """The error does not repeat possible passwords."""
    error = failed(lambda: Bucket.of(url))
    assert (error.id, "secret" in str(error)) == ("s3-url-wrong", False)


def test_uploaded_objects_have_checksums(s3_server: S3Server, s3_proxy: FaultProxy, tmp_path: Path) -> None:
    """Uploaded in one request, or in parts."""
    bucket = Bucket.of(f"{s3_server.bucket()}/a")
    data = os.urandom(9 * 2**20)
    (tmp_path / "big").write_bytes(data)
    bucket.put("big", tmp_path / "big")
    bucket.put_bytes("small", b"0123456789")
    assert (bucket.read("big") == data, bucket.read("small")) == (True, b"0123456789")
    assert all("ChecksumCRC64NVME" in bucket.head(name) for name in ("big", "small"))
    assert len([request for request in s3_proxy.seen("a/big", "PUT") if "partNumber" in request.query]) == 2


def test_deleted_objects_are_gone(s3_server: S3Server, s3_proxy: FaultProxy) -> None:
    """A second deletion is not an error."""
    bucket = Bucket.of(s3_server.bucket())
    bucket.put_bytes("a", b"1")
    there = bucket.files()
    bucket.delete("a")
    bucket.delete("a")
    assert (len(there), bucket.files()) == (1, [])


def test_a_flipped_byte_of_a_small_read_is_detected(s3_server: S3Server, s3_proxy: FaultProxy) -> None:
    """The object is read again."""
    bucket = Bucket.of(s3_server.bucket(files={"a": b"0123456789"}))
    s3_proxy.flip("a", 5)
    assert (bucket.read("a"), len(s3_proxy.seen("a"))) == (b"0123456789", 2)


def test_small_requests_survive_transient_errors(s3_server: S3Server, s3_proxy: FaultProxy) -> None:
    """503, 500 and a reset connection."""
    bucket = Bucket.of(s3_server.bucket(files={"a": b"0123456789"}))
    s3_proxy.answer(503, "SlowDown", times=2, key="a")
    s3_proxy.answer(500, "InternalError", times=1, key="a")
    s3_proxy.cut("a", 5)
    assert (bucket.read("a"), len(s3_proxy.seen("a"))) == (b"0123456789", 5)


def test_uploads_survive_transient_errors(s3_server: S3Server, s3_proxy: FaultProxy, tmp_path: Path) -> None:
    """The parts are sent again."""
    bucket = Bucket.of(s3_server.bucket())
    (tmp_path / "a").write_bytes(b"x" * 100)
    s3_proxy.answer(503, "SlowDown", times=1, key="a", methods=("PUT",))
    bucket.put("a", tmp_path / "a")
    assert bucket.read("a") == b"x" * 100


ACTIONS: list[tuple[str, str, Callable[[Bucket], object]]] = [
    ("s3:ListBucket", "", lambda bucket: bucket.files()),
    ("s3:GetObject", "m/key", lambda bucket: bucket.read("key")),
    ("s3:GetObject", "m/key", lambda bucket: bucket.head("key")),
    ("s3:PutObject", "m/key", lambda bucket: bucket.put_bytes("key", b"")),
    ("s3:PutObject", "m/key", lambda bucket: bucket.put("key", Path(__file__))),
    ("s3:DeleteObject", "m/key", lambda bucket: bucket.delete("key")),
]


def test_a_denied_request_names_the_action_and_key_but_no_secret(
    s3_server: S3Server, s3_proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    """S3's response holds the access key."""
    caplog.set_level(logging.INFO)
    url = s3_server.bucket()
    bucket = Bucket.of(f"{url}/m")
    for code in ("AccessDenied", "ExpiredToken", "InvalidAccessKeyId"):
        for action, key, ask in ACTIONS:
            s3_proxy.answer(403, code, key=key, times=1, methods=("GET", "HEAD", "PUT", "DELETE"))
            error = failed(lambda ask=ask: ask(bucket))  # type: ignore[misc]
            assert (error.id, action in str(error), f"{url}/{key}" in str(error)) == ("s3-denied", True, True)
            said = f"{error} {error.__cause__} {caplog.text}"
            assert [mark for mark in (ACCESS_KEY, SECRET_KEY, SESSION_TOKEN, "Signature") if mark in said] == []


@pytest.mark.parametrize(
    ("id", "url", "name"), [("s3-no-bucket", "s3://no-such-bucket/a", "b"), ("s3-not-found", "", "no-such-key")]
)
def test_missing_buckets_and_keys_are_reported(
    id: str, url: str, name: str, s3_server: S3Server, s3_proxy: FaultProxy
) -> None:
    """By different ids."""
    url = url or s3_server.bucket()
    assert failed(lambda: Bucket.of(url).read(name)).id == id


def test_an_unreachable_s3_is_reported(s3_server: S3Server, s3_proxy: FaultProxy) -> None:
    """After the retry deadline."""
    bucket = Bucket.of(s3_server.bucket(), AT_ONCE)
    s3_proxy.away()
    error = failed(bucket.files)
    assert (error.id, "s3:ListBucket" in str(error)) == ("s3-unreachable", True)


def test_missing_credentials_are_reported_with_a_remedy(s3_server: S3Server, s3_proxy: FaultProxy) -> None:
    """Without a request to S3."""
    url = s3_server.bucket()
    none = dict.fromkeys(["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"], "")
    with s3_environment(none):
        assert failed(Bucket.of(url).files).id == "s3-no-credentials"
    with s3_environment({**none, "AWS_PROFILE": "nobody"}):
        assert failed(Bucket.of(url).files).id == "s3-no-credentials"
    assert s3_proxy.requests == []


@pytest.mark.parametrize(
    ("address", "virtual"),
    [("https://bucket.s3.eu-west-1.amazonaws.com", True), ("http://minio.example:9000", False)],
)
def test_bulk_reads_use_the_endpoint_of_small_requests(address: str, virtual: bool, s3_server: S3Server) -> None:
    """The bucket's own region, address style and certificates."""
    bucket = Bucket.of("s3://bucket/a")
    bucket._on_call({"url": f"{address}{'' if virtual else '/bucket'}/key", "url_path": "/key"})
    bucket._on_send(SimpleNamespace(url=f"{address}/key"))
    bucket._on_answer({"headers": {"x-amz-bucket-region": "eu-west-1"}})
    bundle = Path(botocore.__file__).with_name("cacert.pem")
    with s3_environment({**s3_server.env, "AWS_ENDPOINT_URL_S3": "", "AWS_CA_BUNDLE": str(bundle)}):
        store = bucket.bulk()
    config = {str(name): value for name, value in store.config.items()}
    result = (config["region"], config["virtual_hosted_style_request"] in (True, "true"))
    assert result == ("eu-west-1", virtual)
    assert address in config.values()


@pytest.mark.parametrize("name", ["127", "bucket"])
def test_an_endpoint_that_begins_with_the_buckets_name_is_not_virtual_hosted(
    name: str, s3_server: S3Server, s3_proxy: FaultProxy
) -> None:
    """http://models.example may have a bucket models, addressed by path."""
    bucket = Bucket.of(s3_server.bucket(f"{name}", {f"{name}/a": b"1"}))
    bucket.files()
    assert bytes(obstore.get(bucket.bulk(), f"{name}/a").bytes()) == b"1"


def test_unreadable_keys_fail_without_a_retry() -> None:
    """Whatever the key is."""
    with pytest.raises(ValueError, match="path") as refused:
        obstore.get(MemoryStore(), "a\x7fb")
    result = from_obstore(refused.value, "models", "a\x7fb")
    assert result is not None
    assert result.id == "s3-key-unsafe"


@pytest.mark.parametrize(
    ("code", "status", "id"),
    [
        ("SlowDown", 503, None),
        ("RequestTimeout", 400, None),
        ("InternalError", 500, None),
        ("", 429, None),
        ("ConditionalRequestConflict", 409, None),
        ("RequestTimeTooSkewed", 403, "s3-denied"),
        ("SignatureDoesNotMatch", 403, "s3-denied"),
        ("PreconditionFailed", 412, "s3-changed"),
        ("InvalidObjectState", 403, "s3-refused"),
        ("InvalidRange", 416, "s3-damaged"),
        ("MethodNotAllowed", 405, "s3-refused"),
    ],
)
def test_each_s3_response_maps_to_an_error(code: str, status: int, id: str | None) -> None:
    """None: it is transient."""
    error = from_response(code, status, "", "s3:GetObject", "bucket", "key")
    assert (error and error.id) == id


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("ExpiredToken", "have expired"),
        ("InvalidAccessKeyId", "does not accept"),
        ("RequestTimeTooSkewed", "clock is wrong"),
    ],
)
def test_rejected_credentials_are_not_a_missing_permission(code: str, said: str) -> None:
    """A change of the policy would not help."""
    assert said in str(from_response(code, 403, "", "s3:GetObject", "bucket", "key"))


def test_a_missing_permission_for_the_encryption_key_is_named() -> None:
    """It is taken from S3's message; the rest of the message is not repeated."""
    error = from_response("AccessDenied", 403, "kms:Decrypt", "s3:GetObject", "bucket", "key")
    assert str(error) == "s3-denied: kms:Decrypt on s3://bucket/key is not allowed; allow it in the policy of the role"


def test_retry_pauses_double_with_jitter_until_the_deadline() -> None:
    """Each pause is between half and all of its limit."""
    now = [0.0]
    waited: list[float] = []

    def wait(stop: threading.Event, seconds: float) -> bool:
        waited.append(seconds)
        now[0] += seconds
        return False

    messages: list[tuple[float, str]] = []

    def tell(silent_s: float, why: str) -> None:
        messages.append((silent_s, why))

    retry_policy = RetryPolicy(
        seconds=30.0, first_s=0.1, longest_s=5.0, clock=lambda: now[0], wait=wait, on_silence=tell
    )
    assert [retry_policy.pause_s(attempt, 1.0) for attempt in (0, 1, 2, 99)] == [0.1, 0.2, 0.4, 5.0]
    assert retry_policy.pause_s(2, 0.0) == 0.2
    waiting = retry_policy.begin()
    attempts = 0
    while waiting.again(attempts, threading.Event(), "Timeout"):
        attempts += 1
    assert 30.0 <= now[0] <= 35.0
    assert 3.0 <= messages[0][0] <= 8.0
    assert {why for _, why in messages} == {"Timeout"}
    assert 1 < len(messages) < attempts  # not in the first seconds
    messages.clear()
    waiting.arrived()
    assert waiting.again(0, threading.Event())
    waiting.arrived()
    assert messages == [(0.0, "")]  # that it is back, once
