"""Translates errors of S3 and its two clients into SourceErrors with a remedy.

The clients' own texts are never repeated: they may hold access keys and signatures.
"""

from __future__ import annotations

import re

from workers.artifacts.sources.listing import SourceError

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
    from botocore import exceptions as botocore  # type: ignore[import-untyped]

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
