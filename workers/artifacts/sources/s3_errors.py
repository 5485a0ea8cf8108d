"""What S3 and its two clients complain of, as errors that say what to do. No text of theirs is handed on: it may hold
access keys, and what was signed."""

from __future__ import annotations

import re

from workers.artifacts.sources.listing import SourceError

# Codes of S3's errors (docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html).
DENIED = frozenset({"AccessDenied", "AllAccessDisabled", "AccountProblem", "InvalidSecurity", "403", "401"})
WRONG_CREDENTIALS = frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "NotSignedUp"})
EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"})
PASSING = frozenset(
    {
        "SlowDown",
        "RequestTimeout",
        "RequestTimeoutException",
        "Throttling",
        "ThrottlingException",
        "InternalError",
        "OperationAborted",
        "ConditionalRequestConflict",
    }
)
PASSING_STATUS = frozenset({408, 425, 429})
CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,64})</Code>")
STATUS = re.compile(r"status(?: code)?:? (\d{3})")
LACKS = re.compile(r"not authorized to perform: ([a-z0-9-]+:[A-Za-z0-9]+)")


def url_of(bucket: str, key: str = "") -> str:
    return f"s3://{bucket}/{key}" if key else f"s3://{bucket}"


def by_code(code: str, status: int, lacks: str, action: str, bucket: str, key: str) -> SourceError | None:
    """What an answer of S3 means; None: it may be another one in a moment.

    ``lacks``: the action that S3 says is not allowed, or empty: then it is ``action``, such as s3:GetObject.
    """
    where = url_of(bucket, key)
    if status >= 500 or status in PASSING_STATUS or code in PASSING:
        return None
    if code == "InvalidObjectState":
        return SourceError("s3-refused", f"{where} is archived", "restore it from the archive first")
    if code in EXPIRED:
        return SourceError("s3-denied", f"{action} on {where}: the credentials have expired", "renew them")
    if code in WRONG_CREDENTIALS:
        return SourceError(
            "s3-denied",
            f"{action} on {where}: S3 does not accept the credentials ({code})",
            "`aws sts get-caller-identity` shows whose they are",
        )
    if code == "RequestTimeTooSkewed":
        return SourceError("s3-denied", f"{action} on {where}: this host's clock is wrong", "set it by NTP")
    if code in DENIED or status in (401, 403):
        resource = f"arn:aws:s3:::{bucket}" + ("" if action == "s3:ListBucket" else f"/{key or '*'}")
        return SourceError(
            "s3-denied",
            f"{lacks or action} on {where} is not allowed",
            "the policy of the role needs it"
            if lacks.startswith("kms:")
            else f"the policy of the role needs {lacks or action} on {resource}",
        )
    if code == "NoSuchBucket":
        return SourceError("s3-no-bucket", f"there is no bucket {bucket}", "is its name right, and the endpoint?")
    if code in ("NoSuchKey", "NotFound", "404") or status == 404:
        return SourceError("s3-not-found", f"there is no {where}", "is the path right?")
    if code in ("PreconditionFailed", "412") or status == 412:
        return changed(bucket, key)
    if code == "InvalidRange" or status == 416:
        return SourceError("s3-damaged", f"{where} has fewer bytes than S3 says", "upload it again")
    return SourceError("s3-refused", f"{action} on {where}: S3 answers {code or status}", "")


def changed(bucket: str, key: str) -> SourceError:
    return SourceError("s3-changed", f"{url_of(bucket, key)} has changed since it was listed", "try again")


def of_boto(error: Exception, action: str, bucket: str, key: str = "") -> SourceError | None:
    """An exception of boto3; None: another attempt may go better."""
    from botocore import exceptions as botocore  # type: ignore[import-untyped]

    where = url_of(bucket, key)
    if isinstance(error, botocore.ClientError):
        told = error.response.get("Error", {})
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        lacks = LACKS.search(str(told.get("Message", "")))
        return by_code(str(told.get("Code", "")), int(status), lacks[1] if lacks else "", action, bucket, key)
    if isinstance(error, botocore.NoCredentialsError | botocore.PartialCredentialsError):
        return SourceError(
            "s3-no-credentials",
            f"{action} on {where}: boto3 finds no credentials",
            "give the host's role access, or set AWS_PROFILE",
        )
    if isinstance(
        error,
        botocore.CredentialRetrievalError
        | botocore.ProfileNotFound
        | botocore.SSOError
        | botocore.ConfigParseError
        | botocore.ConfigNotFound,
    ):
        return SourceError(
            "s3-no-credentials",
            f"{action} on {where}: the credentials cannot be had ({type(error).__name__})",
            "`aws sts get-caller-identity` tells more",
        )
    if isinstance(error, botocore.SSLError):
        return SourceError(
            "s3-unreachable",
            f"{action} on {where}: the certificate of the endpoint is not trusted",
            "AWS_CA_BUNDLE names the certificates that are",
        )
    if isinstance(error, botocore.ParamValidationError | botocore.InvalidRegionError | ValueError):
        return SourceError(
            "s3-url-wrong", f"{where} cannot be asked for ({type(error).__name__})", "see docs/artifacts.md"
        )
    if isinstance(error, botocore.BotoCoreError | OSError):
        return None
    raise error


def of_obstore(error: Exception, bucket: str, key: str) -> SourceError | None:
    """An exception of obstore's reads; None: another attempt may go better."""
    if isinstance(error, FileNotFoundError):
        return changed(bucket, key)  # it was there when it was listed
    if isinstance(error, ValueError):  # before anything is asked
        return SourceError("s3-key-unsafe", f"{url_of(bucket, key)!r} cannot be asked for", "rename the object")
    kind, text = type(error).__name__, str(error)
    code, status, lacks = CODE.search(text), STATUS.search(text), LACKS.search(text)
    known = {"PermissionDeniedError": 403, "UnauthenticatedError": 401, "PreconditionError": 412, "NotFoundError": 404}
    number = int(status[1]) if status else known.get(kind, 0)
    if not code and not number:
        return None
    return by_code(code[1] if code else "", number, lacks[1] if lacks else "", "s3:GetObject", bucket, key)


def is_short(error: Exception) -> bool:
    """Whether obstore complains that there is nothing where S3 says there is."""
    return "InvalidRange" in str(error)


def unreachable(action: str, bucket: str, key: str, silent_s: float, last: Exception | None) -> SourceError:
    return SourceError(
        "s3-unreachable",
        f"{action} on {url_of(bucket, key)}: nothing for {silent_s:.0f} s ({type(last).__name__})",
        "is the endpoint right (AWS_ENDPOINT_URL_S3), and the network there?",
    )
