"""A prefix of an S3 bucket: small requests and uploads by boto3, the way to obstore's bulk reads."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from workers.artifacts.fetch.retry_policy import RetryPolicy
from workers.artifacts.sources.listing import RemoteFile, SourceError, Stopped
from workers.artifacts.sources.s3_errors import of_boto, unreachable

CONNECT_S = 5.0
READ_S = 20.0  # without one byte from a connection
UPLOAD_ATTEMPTS = 8  # of each part, by botocore's own backoff
POOL = 64  # connections that boto3 keeps
CREDENTIALS_S = 300.0  # for which obstore keeps what boto3 gave it; boto3 renews before they expire
DEFAULT_REGION = "us-east-1"
WORK = ".arriving"  # a folder in the one that a fetch fills, gone at the end
NAME_BYTES = 255  # of one folder or file: NAME_MAX of Linux's file systems

T = TypeVar("T")


class Bucket:
    """The objects below ``s3://bucket/prefix``; a name is a key without the prefix.

    Credentials, region and endpoint are found as boto3 finds them. Every method blocks, may be called from any thread,
    and raises SourceError.
    """

    def __init__(self, bucket: str, prefix: str = "", patience: RetryPolicy | None = None) -> None:
        """``prefix`` neither begins nor ends with a slash. ``patience``: with an S3 that does not answer."""
        self.bucket = bucket
        self.prefix = prefix
        self.region = DEFAULT_REGION
        self._patience = patience or RetryPolicy(seconds=20.0)
        self._session: Any = None
        self._loading = threading.Lock()  # a session is not to be used by two threads at once, a client is
        self._clients: dict[int, Any] = {}
        self._address = ""  # scheme and host of the last request: that of the bucket's region, after redirections
        self._virtual = False  # the host names the bucket, and the path does not

    @classmethod
    def of(cls, url: str, patience: RetryPolicy | None = None) -> Bucket:
        """Raises SourceError s3-url-wrong."""
        rest = url.removeprefix("s3://")
        bucket, _, prefix = rest.partition("/")
        if rest == url or not bucket or any(sign in bucket for sign in "@:?#"):
            raise SourceError("s3-url-wrong", f"{_harmless(url)} is no s3://BUCKET/PREFIX", "see docs/artifacts.md")
        return cls(bucket, prefix.strip("/"), patience)

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}" if self.prefix else f"s3://{self.bucket}"

    def key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    # Small requests

    def files(self) -> list[RemoteFile]:
        """All objects below the prefix, sorted by name, without the empty ones that stand for folders.

        Raises SourceError s3-key-unsafe for a name that no file below a folder can have.
        """
        found = []
        for item in self._pages():
            name = item["Key"][len(self.key("")) :]
            if not item["Size"] and (not name or name.endswith("/")):
                continue
            if wrong := wrong_with(name):
                raise SourceError("s3-key-unsafe", f"{self.url}: {self.key(name)!r}: {wrong}", "rename the object")
            found.append(RemoteFile(name=name, size=item["Size"], tag=item["ETag"].strip('"')))
        if both := file_and_folder({file.name for file in found}):
            what = f"{self.url}: {self.key(both)!r} is an object and a folder of others"
            raise SourceError("s3-key-unsafe", what, "rename the object")
        return sorted(found, key=lambda file: file.name)

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Its bytes from ``start`` to ``end`` (exclusive). The whole of it is checked against S3's checksum."""
        if end is not None and end <= start:
            return b""
        asked = {} if start == 0 and end is None else {"Range": f"bytes={start}-{'' if end is None else end - 1}"}
        key = self.key(name)

        def ask(client: Any) -> bytes:
            data: bytes = client.get_object(Bucket=self.bucket, Key=key, **asked)["Body"].read()
            return data

        return self._ask("s3:GetObject", key, ask)

    def head(self, name: str, part: int | None = None, stop: threading.Event | None = None) -> dict[str, Any]:
        """What HeadObject says, checksums included; of one part of a multipart upload, or of all. Raises Stopped soon
        after ``stop`` is set."""
        asked = {} if part is None else {"PartNumber": part}
        key = self.key(name)

        def ask(client: Any) -> dict[str, Any]:
            told: dict[str, Any] = client.head_object(Bucket=self.bucket, Key=key, ChecksumMode="ENABLED", **asked)
            return told

        return self._ask("s3:GetObject", key, ask, stop=stop)

    def put_bytes(self, name: str, data: bytes, only_new: bool = False) -> bool:
        """``only_new``: not over an object that is there already, also when two write at once. True: it was written."""
        key = self.key(name)
        asked = {"IfNoneMatch": "*"} if only_new else {}
        try:
            self._ask(
                "s3:PutObject",
                key,
                lambda client: client.put_object(
                    Bucket=self.bucket, Key=key, Body=data, ChecksumAlgorithm="CRC64NVME", **asked
                ),
            )
        except SourceError as error:
            if only_new and error.id == "s3-changed":
                return False
            raise
        return True

    def put(self, name: str, path: Path) -> None:
        """Upload a file, in parts where it is large, each with a checksum that S3 compares. Raises OSError where the
        file cannot be read."""
        from s3transfer.manager import TransferManager  # type: ignore[import-untyped]

        key = self.key(name)

        def ask(client: Any) -> None:
            with path.open("rb") as file, TransferManager(client) as manager:
                manager.upload(file, self.bucket, key, extra_args={"ChecksumAlgorithm": "CRC64NVME"}).result()

        with path.open("rb"):
            pass  # what cannot be read is no matter of S3
        self._ask("s3:PutObject", key, ask, attempts=UPLOAD_ATTEMPTS)

    def delete(self, name: str) -> None:
        """Of an object that is not there: nothing happens."""
        key = self.key(name)
        self._ask("s3:DeleteObject", key, lambda client: client.delete_object(Bucket=self.bucket, Key=key))

    # Bulk reads

    def bulk(self) -> Any:
        """An obstore S3Store of the bucket (keys, not names) that makes one attempt of each request.

        Something must have been asked of the bucket before: its address and region are taken over.
        """
        from obstore.store import S3Store

        config: dict[str, Any] = {
            "region": self.region,
            # obstore prefers this variable to the option of the other name
            "aws_endpoint_url_s3" if "AWS_ENDPOINT_URL_S3" in os.environ else "endpoint": self._address,
            "virtual_hosted_style_request": self._virtual,
            "skip_signature": False,
        }
        options: dict[str, Any] = {
            "allow_http": self._address.startswith("http://"),
            "connect_timeout": timedelta(seconds=CONNECT_S),
            "read_timeout": timedelta(seconds=READ_S),
            "timeout": timedelta(hours=1),  # of a whole answer: a slow one is no broken one
            "pool_max_idle_per_host": "1024",
        }
        if bundle := os.environ.get("AWS_CA_BUNDLE"):
            options["root_certificate"] = Path(bundle).read_bytes()
        return S3Store(
            self.bucket,
            config=config,  # type: ignore[arg-type]
            client_options=options,  # type: ignore[arg-type]
            retry_config={"max_retries": 0},
            credential_provider=self._credentials,
        )

    def _credentials(self) -> Any:
        """For obstore, from boto3's chain."""
        found = self._session.get_credentials().get_frozen_credentials()
        return {
            "access_key_id": found.access_key,
            "secret_access_key": found.secret_key,
            "token": found.token,
            "expires_at": datetime.now(timezone.utc) + timedelta(seconds=CREDENTIALS_S),
        }

    # Asking

    def _pages(self) -> Iterator[dict[str, Any]]:
        asked: dict[str, Any] = {"Bucket": self.bucket, "Prefix": self.key("")}
        while True:
            page = self._ask("s3:ListBucket", self.key(""), lambda client: client.list_objects_v2(**asked))
            yield from page.get("Contents", [])
            if not page.get("IsTruncated"):
                return
            asked["ContinuationToken"] = page["NextContinuationToken"]

    def _ask(
        self,
        action: str,
        key: str,
        ask: Callable[[Any], T],
        attempts: int = 1,
        stop: threading.Event | None = None,
    ) -> T:
        """Until it is answered, or the patience ends."""
        from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped]

        stop = stop or threading.Event()
        waiting = self._patience.begin()
        attempt = 0
        while True:
            try:
                found = ask(self._client(attempts))
                waiting.arrived()
                return found
            except (BotoCoreError, ClientError, OSError, ValueError) as error:
                known = of_boto(error, action, self.bucket, key)
                last = error
            if known is not None:
                raise known from None  # botocore's text may hold what must not be told
            if not waiting.again(attempt, stop, type(last).__name__):
                raise unreachable(action, self.bucket, key, waiting.silent_s, last) from None
            if stop.is_set():
                raise Stopped
            attempt += 1

    def _client(self, attempts: int) -> Any:
        """botocore's; it makes itself ``attempts`` of each request."""
        with self._loading:
            if attempts not in self._clients:
                self._clients[attempts] = self._connected(attempts)
            return self._clients[attempts]

    def _connected(self, attempts: int) -> Any:
        """A session of its own finds the credentials as they are now, also where a file of them has changed since."""
        import botocore.session  # type: ignore[import-untyped]
        from botocore.config import Config  # type: ignore[import-untyped]

        logger = logging.getLogger("botocore")
        # At DEBUG it writes session tokens, at INFO four lines at each start of a replica.
        logger.setLevel(max(logger.level, logging.WARNING))
        if self._session is None:
            self._session = botocore.session.Session()
            self._session.register_component("data_loader", _loader())
        config = Config(
            connect_timeout=CONNECT_S,
            read_timeout=READ_S,
            max_pool_connections=POOL,
            retries={"total_max_attempts": attempts, "mode": "standard"},
        )
        client = self._session.create_client("s3", config=config)
        self.region = client.meta.region_name or DEFAULT_REGION
        client.meta.events.register("before-call.s3", self._on_call)
        client.meta.events.register("before-send.s3", self._on_send)
        client.meta.events.register("response-received.s3", self._on_answer)
        return client

    def _on_call(self, params: Any, **_: Any) -> None:
        """An endpoint's own host may begin with the name of the bucket: the path tells."""
        path, within = urlsplit(params["url"]).path, urlsplit(params["url_path"]).path
        self._virtual = path.strip("/") == within.strip("/")

    def _on_send(self, request: Any, **_: Any) -> None:
        parts = urlsplit(request.url)
        self._address = f"{parts.scheme}://{parts.netloc}"

    def _on_answer(self, response_dict: Any = None, **_: Any) -> None:
        if region := (response_dict or {}).get("headers", {}).get("x-amz-bucket-region"):
            self.region = region


@cache
def _loader() -> Any:
    """Of botocore's descriptions of S3: reading them takes 0.1 s, once in a process."""
    from botocore.loaders import create_loader  # type: ignore[import-untyped]

    return create_loader()


def wrong_with(name: str) -> str:
    """Why no file below a folder can have this name; empty: one can."""
    parts = name.split("/")
    if "" in parts:
        return "its name has an empty part"
    if {".", ".."} & set(parts):
        return "its name leaves the folder"
    if any(ord(sign) < 32 or ord(sign) == 127 for sign in name):
        return "its name has a character that no file can have"
    if parts[0] == WORK:
        return f"{WORK} is kept for what arrives"
    if any(len(part.encode()) > NAME_BYTES for part in parts):
        return "a part of its name is longer than 255 bytes"
    return ""


def file_and_folder(names: set[str]) -> str | None:
    """One of the names that would be a file and a folder at once."""
    folders = {name[:at] for name in names for at, sign in enumerate(name) if sign == "/"}
    return min(names & folders, default=None)


def _harmless(url: str) -> str:
    """Without what may be credentials: user and password, and a query."""
    return url.rpartition("@")[2].partition("?")[0]
