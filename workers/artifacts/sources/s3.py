"""Accesses a prefix of an S3 bucket: small requests and uploads with boto3, bulk reads with obstore.

Errors of both clients become SourceErrors with a remedy. The clients' own texts are never repeated: they may hold
access keys and signatures.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from workers.artifacts.fetch.retry_policy import RetryPolicy
from workers.artifacts.sources.listing import RemoteFile, SourceError, Stopped

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing since Python 3.11

CONNECT_S = 5.0
READ_S = 20.0  # timeout without a byte from a connection
UPLOAD_ATTEMPTS = 8  # per part, with botocore's own backoff
POOL = 64  # boto3's connection pool
CREDENTIALS_S = 300.0  # how long obstore caches credentials; boto3 renews them before they expire
DEFAULT_REGION = "us-east-1"
WORK = ".arriving"  # work folder inside the target folder, removed at the end
NAME_BYTES = 255  # NAME_MAX of Linux file systems

# Codes of S3's errors (docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html).
DENIED = frozenset({"AccessDenied", "AllAccessDisabled", "AccountProblem", "InvalidSecurity", "403", "401"})
WRONG_CREDENTIALS = frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "NotSignedUp"})
EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"})
SLOW = frozenset({"SlowDown", "RequestTimeout", "RequestTimeoutException", "Throttling", "ThrottlingException"})
PASSING = SLOW | {"InternalError", "OperationAborted", "ConditionalRequestConflict"}
PASSING_STATUS = frozenset({408, 425, 429})
# Statuses of obstore's exceptions whose text has none.
STATUSES = {"UnauthenticatedError": 401, "PermissionDeniedError": 403, "NotFoundError": 404, "PreconditionError": 412}
CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,64})</Code>")
STATUS = re.compile(r"status(?: code)?:? (\d{3})")
LACKS = re.compile(r"not authorized to perform: ([a-z0-9-]+:[A-Za-z0-9]+)")

T = TypeVar("T")


class Bucket:
    """The objects below ``s3://bucket/prefix``; a name is a key without the prefix.

    Credentials, region and endpoint come from boto3's configuration chain. Every method blocks, is thread-safe, and
    raises SourceError.
    """

    def __init__(self, bucket: str, prefix: str = "", retry_policy: RetryPolicy | None = None) -> None:
        """``prefix`` neither begins nor ends with a slash. ``retry_policy``: retries when S3 does not answer."""
        self.bucket = bucket
        self.prefix = prefix
        self.region = DEFAULT_REGION
        self.retry_policy = retry_policy or RetryPolicy(seconds=20.0)
        self._session: Any = None
        self._loading = threading.Lock()  # a session is not thread-safe, a client is
        self._clients: dict[int, Any] = {}
        self._address = ""  # scheme and host of the last request: the bucket's region after redirects
        self._virtual = False  # virtual-hosted style: the host names the bucket

    @classmethod
    def of(cls, url: str, retry_policy: RetryPolicy | None = None) -> Self:
        """Parses an S3 URL. Raises SourceError s3-url-wrong."""
        path = url.removeprefix("s3://")
        bucket, _, prefix = path.partition("/")
        if path == url or not bucket or any(sign in bucket for sign in "@:?#"):
            message = f"{_harmless(url)} is not of the form s3://BUCKET/PREFIX"
            raise SourceError("s3-url-wrong", message, "see docs/artifacts.md")
        return cls(bucket, prefix.strip("/"), retry_policy)

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}" if self.prefix else f"s3://{self.bucket}"

    def key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    # Small requests

    def files(self) -> list[RemoteFile]:
        """Returns all objects below the prefix, sorted by name, without empty folder markers.

        Raises SourceError s3-key-unsafe for a name that is not a valid file path.
        """
        files = []
        for item in self._pages():
            name = item["Key"][len(self.key("")) :]
            if not item["Size"] and (not name or name.endswith("/")):
                continue
            if problem := name_problem(name):
                raise SourceError("s3-key-unsafe", f"{self.url}: {self.key(name)!r}: {problem}", "rename the object")
            files.append(RemoteFile(name=name, size=item["Size"], tag=item["ETag"].strip('"')))
        if conflict := file_and_folder({file.name for file in files}):
            message = f"{self.url}: {self.key(conflict)!r} is both an object and a folder"
            raise SourceError("s3-key-unsafe", message, "rename the object")
        return sorted(files, key=lambda file: file.name)

    def read(self, name: str) -> bytes:
        """Returns the content of an object, verified by S3's checksum."""
        where = {"Bucket": self.bucket, "Key": self.key(name)}
        data: bytes = self._ask("s3:GetObject", where["Key"], lambda client: client.get_object(**where)["Body"].read())
        return data

    def head(self, name: str, part: int | None = None, stop: threading.Event | None = None) -> dict[str, Any]:
        """Returns the HeadObject response with checksums, of one part of a multipart upload or of the object. Raises
        Stopped soon after ``stop`` is set."""
        arguments: dict[str, Any] = {"Bucket": self.bucket, "Key": self.key(name), "ChecksumMode": "ENABLED"}
        arguments |= {} if part is None else {"PartNumber": part}
        response: dict[str, Any] = self._ask(
            "s3:GetObject", self.key(name), lambda client: client.head_object(**arguments), stop=stop
        )
        return response

    def put_bytes(self, name: str, data: bytes) -> None:
        """Writes an object."""
        where = {"Bucket": self.bucket, "Key": self.key(name)}
        self._ask(
            "s3:PutObject",
            where["Key"],
            lambda client: client.put_object(**where, Body=data, ChecksumAlgorithm="CRC64NVME"),
        )

    def put(self, name: str, path: Path) -> None:
        """Uploads a file, in parts if it is large, each with a checksum that S3 verifies. Raises OSError if the file
        cannot be read."""
        from s3transfer.manager import TransferManager  # type: ignore[import-untyped]

        key = self.key(name)

        def ask(client: Any) -> None:
            with path.open("rb") as file, TransferManager(client) as manager:
                manager.upload(file, self.bucket, key, extra_args={"ChecksumAlgorithm": "CRC64NVME"}).result()

        with path.open("rb"):
            pass  # an unreadable file is not an error of S3
        self._ask("s3:PutObject", key, ask, attempts=UPLOAD_ATTEMPTS)

    def delete(self, name: str) -> None:
        """Deletes an object, if it exists."""
        key = self.key(name)
        self._ask("s3:DeleteObject", key, lambda client: client.delete_object(Bucket=self.bucket, Key=key))

    # Bulk reads

    def bulk(self) -> Any:
        """Returns an obstore S3Store of the bucket (keys, not names) that does not retry.

        A boto3 request must come before: its endpoint and region are reused.
        """
        from obstore.store import S3Store

        config: dict[str, Any] = {
            "region": self.region,
            # obstore prefers this variable to the "endpoint" option
            "aws_endpoint_url_s3" if "AWS_ENDPOINT_URL_S3" in os.environ else "endpoint": self._address,
            "virtual_hosted_style_request": self._virtual,
            "skip_signature": False,
        }
        options: dict[str, Any] = {
            "allow_http": self._address.startswith("http://"),
            "connect_timeout": timedelta(seconds=CONNECT_S),
            "read_timeout": timedelta(seconds=READ_S),
            "timeout": timedelta(hours=1),  # of a complete response: slow is not broken
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
        """Returns credentials from boto3's chain in obstore's format."""
        credentials = self._session.get_credentials().get_frozen_credentials()
        return {
            "access_key_id": credentials.access_key,
            "secret_access_key": credentials.secret_key,
            "token": credentials.token,
            "expires_at": datetime.now(timezone.utc) + timedelta(seconds=CREDENTIALS_S),
        }

    # Requests

    def _pages(self) -> Iterator[dict[str, Any]]:
        arguments: dict[str, Any] = {"Bucket": self.bucket, "Prefix": self.key("")}
        while True:
            page = self._ask("s3:ListBucket", self.key(""), lambda client: client.list_objects_v2(**arguments))
            yield from page.get("Contents", [])
            if not page.get("IsTruncated"):
                return
            arguments["ContinuationToken"] = page["NextContinuationToken"]

    def _ask(
        self,
        action: str,
        key: str,
        ask: Callable[[Any], T],
        attempts: int = 1,
        stop: threading.Event | None = None,
    ) -> T:
        """Runs ``ask`` with a client, and retries transient errors until the retry deadline."""
        from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped]

        stop = stop or threading.Event()
        retry = self.retry_policy.begin()
        attempt = 0
        while True:
            try:
                response = ask(self._client(attempts))
                retry.arrived()
                return response
            except (BotoCoreError, ClientError, OSError, ValueError) as error:
                fatal = from_boto(error, action, self.bucket, key)
                last = error
            if fatal is not None:
                raise fatal from None  # botocore's text may hold secrets
            if not retry.again(attempt, stop, type(last).__name__):
                raise unreachable(action, self.bucket, key, retry.silent_s, last) from None
            if stop.is_set():
                raise Stopped
            attempt += 1

    def _client(self, attempts: int) -> Any:
        """Returns a botocore client that makes up to ``attempts`` attempts of each request."""
        with self._loading:
            if attempts not in self._clients:
                self._clients[attempts] = self._connected(attempts)
            return self._clients[attempts]

    def _connected(self, attempts: int) -> Any:
        """Creates a client; a session of its own picks up credential files that have changed."""
        import botocore.session  # type: ignore[import-untyped]
        from botocore.config import Config  # type: ignore[import-untyped]

        logger = logging.getLogger("botocore")
        # It logs session tokens at DEBUG, and four lines per replica start at INFO.
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
        """Detects virtual-hosted style by the path; an endpoint's own host may begin with the bucket's name."""
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
    """Returns botocore's loader of API descriptions; loading S3's takes 0.1 s, so it is shared in a process."""
    from botocore.loaders import create_loader  # type: ignore[import-untyped]

    return create_loader()


def name_problem(name: str) -> str:
    """Returns why a key is not a valid file path below a folder; empty: it is valid."""
    parts = name.split("/")
    if "" in parts:
        return "its name has an empty part"
    if {".", ".."} & set(parts):
        return "its name leads out of the folder"
    if any(ord(sign) < 32 or ord(sign) == 127 for sign in name):
        return "its name has a control character"
    if parts[0] == WORK:
        return f"the name {WORK} is reserved"
    if any(len(part.encode()) > NAME_BYTES for part in parts):
        return "a part of its name is longer than 255 bytes"
    return ""


def file_and_folder(names: set[str]) -> str | None:
    """Returns a name that would be both a file and a folder; None: there is none."""
    folders = {name[:at] for name in names for at, sign in enumerate(name) if sign == "/"}
    return min(names & folders, default=None)


def _harmless(url: str) -> str:
    """Returns the URL without possible credentials: user, password and query."""
    return url.rpartition("@")[2].partition("?")[0]


def url_of(bucket: str, key: str = "") -> str:
    return f"s3://{bucket}/{key}" if key else f"s3://{bucket}"


def from_response(code: str, status: int, lacks: str, action: str, bucket: str, key: str) -> SourceError | None:
    """Returns the error of an S3 response; None: it is transient.

    ``lacks``: the action that S3 reports as not allowed; empty: ``action``, such as s3:GetObject.
    """
    where = url_of(bucket, key)
    if status >= 500 or status in PASSING_STATUS or code in PASSING:
        return None
    if code == "InvalidObjectState":
        return SourceError("s3-refused", f"{where} is archived", "restore it from the archive")
    if code in EXPIRED:
        return SourceError("s3-denied", f"{action} on {where}: the credentials have expired", "renew them")
    if code in WRONG_CREDENTIALS:
        message = f"{action} on {where}: S3 does not accept the credentials ({code})"
        return SourceError("s3-denied", message, "check them with `aws sts get-caller-identity`")
    if code == "RequestTimeTooSkewed":
        return SourceError("s3-denied", f"{action} on {where}: this host's clock is wrong", "synchronize it with NTP")
    if code in DENIED or status in (401, 403):
        resource = f"arn:aws:s3:::{bucket}" + ("" if action == "s3:ListBucket" else f"/{key or '*'}")
        allowed = "it" if lacks.startswith("kms:") else f"{lacks or action} on {resource}"
        message = f"{lacks or action} on {where} is not allowed"
        return SourceError("s3-denied", message, f"allow {allowed} in the policy of the role")
    if code == "NoSuchBucket":
        return SourceError("s3-no-bucket", f"the bucket {bucket} does not exist", "check its name and the endpoint")
    if code in ("NoSuchKey", "NotFound", "404") or status == 404:
        return SourceError("s3-not-found", f"{where} does not exist", "check the path")
    if code in ("PreconditionFailed", "412") or status == 412:
        return changed(bucket, key)
    if code == "InvalidRange" or status == 416:
        return SourceError("s3-damaged", f"{where} has fewer bytes than its listed size", "upload it again")
    return SourceError("s3-refused", f"{action} on {where}: S3 answers {code or status}", "")


def changed(bucket: str, key: str) -> SourceError:
    return SourceError("s3-changed", f"{url_of(bucket, key)} has changed since it was listed", "try again")


def from_boto(error: Exception, action: str, bucket: str, key: str = "") -> SourceError | None:
    """Translates an exception of boto3; None: it is transient."""
    from botocore import exceptions as botocore

    where, name = url_of(bucket, key), type(error).__name__
    if isinstance(error, botocore.ClientError):
        details = error.response.get("Error", {})
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        lacks = LACKS.search(str(details.get("Message", "")))
        return from_response(str(details.get("Code", "")), int(status), lacks[1] if lacks else "", action, bucket, key)
    if isinstance(error, botocore.NoCredentialsError | botocore.PartialCredentialsError):
        message, hint = "boto3 finds no credentials", "give the host's role access, or set AWS_PROFILE"
        return SourceError("s3-no-credentials", f"{action} on {where}: {message}", hint)
    unloadable = (botocore.CredentialRetrievalError, botocore.ProfileNotFound, botocore.SSOError)
    if isinstance(error, (*unloadable, botocore.ConfigParseError, botocore.ConfigNotFound)):
        message, hint = f"the credentials cannot be loaded ({name})", "run `aws sts get-caller-identity` for details"
        return SourceError("s3-no-credentials", f"{action} on {where}: {message}", hint)
    if isinstance(error, botocore.SSLError):
        hint = "set AWS_CA_BUNDLE to a bundle with its certificate authority"
        return SourceError("s3-unreachable", f"{action} on {where}: the endpoint's certificate is not trusted", hint)
    if isinstance(error, botocore.ParamValidationError | botocore.InvalidRegionError | ValueError):
        return SourceError("s3-url-wrong", f"{where} is not a valid S3 location ({name})", "see docs/artifacts.md")
    if isinstance(error, botocore.BotoCoreError | OSError):
        return None
    raise error


def from_obstore(error: Exception, bucket: str, key: str) -> SourceError | None:
    """Translates an exception of an obstore read; None: it is transient."""
    if isinstance(error, FileNotFoundError):
        return changed(bucket, key)  # it existed when it was listed
    if isinstance(error, ValueError):  # raised before any request
        return SourceError("s3-key-unsafe", f"{url_of(bucket, key)!r} is not a readable key", "rename the object")
    text = str(error)
    code, status, lacks = CODE.search(text), STATUS.search(text), LACKS.search(text)
    number = int(status[1]) if status else STATUSES.get(type(error).__name__, 0)
    if not code and not number:
        return None
    return from_response(code[1] if code else "", number, lacks[1] if lacks else "", "s3:GetObject", bucket, key)


def is_short(error: Exception) -> bool:
    """Returns whether obstore reports that the object ends before the range."""
    return "InvalidRange" in str(error)


def unreachable(action: str, bucket: str, key: str, silent_s: float, last: Exception | None) -> SourceError:
    return SourceError(
        "s3-unreachable",
        f"{action} on {url_of(bucket, key)}: no answer for {silent_s:.0f} s ({type(last).__name__})",
        "check the network and the endpoint (AWS_ENDPOINT_URL_S3)",
    )
