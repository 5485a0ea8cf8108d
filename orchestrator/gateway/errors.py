"""What a client did wrong, or what we cannot do now, in OpenAI's shape."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """An answer that is not a completion. The constructors below are the vocabulary; codes are part of the API."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """`{"error": {...}}`."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


def invalid(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def model_not_found(name: str, known: list[str]) -> ApiError:
    message = f"The model {name!r} does not exist here. Models: {', '.join(sorted(known)) or 'none'}."
    return ApiError(404, message, param="model", code="model_not_found")


def too_long(param: str, prompt: int, max_tokens: int | None, max_len: int, max_prompt: int) -> ApiError:
    """The prompt (the parameter ``param``), alone or with the tokens asked for, is longer than the model allows."""
    if prompt > max_prompt:
        what = f"This model takes prompts of at most {max_prompt} tokens; this one has {prompt}."
    elif max_tokens is None:
        what = f"This model's maximum context length is {max_len} tokens; the prompt of {prompt} leaves no room."
    else:
        what = (
            f"This model's maximum context length is {max_len} tokens; you asked for {prompt + max_tokens} "
            f"({prompt} in the prompt, {max_tokens} to generate)."
        )
    at_fault = param if max_tokens is None or prompt > max_prompt else "max_tokens"
    return ApiError(400, what, param=at_fault, code="context_length_exceeded")


def body_too_large(limit: int) -> ApiError:
    return ApiError(413, f"The request's body is over the limit of {limit} bytes.", code="body_too_large")


def wrong_content_type(given: str) -> ApiError:
    message = f"The body's content type is {given!r}; it must be 'application/json'."
    return ApiError(415, message, code="unsupported_media_type")


def queue_full(model: str, waiting: int, retry_after_s: int) -> ApiError:
    message = f"The queue of {model!r} is full: {waiting} requests wait. Try again in {retry_after_s} s."
    return ApiError(429, message, type="rate_limit_error", code="queue_full", retry_after_s=retry_after_s)


def model_unavailable(model: str, state: str, reason: str | None) -> ApiError:
    """No replica of the model can serve now."""
    code = "model_loading" if state == "loading" else "model_unavailable"
    message = f"The model {model!r} is {state}" + (f": {reason}" if reason else "") + "."
    return ApiError(503, message, type="service_unavailable", code=code, retry_after_s=2 if state == "loading" else 10)


def replica_lost(model: str) -> ApiError:
    message = f"The replica of {model!r} that worked on this request is gone. Send it again."
    return ApiError(503, message, type="service_unavailable", code="replica_lost", retry_after_s=1)


def engine_failed(model: str, what: str) -> ApiError:
    return ApiError(500, f"The engine of {model!r} failed: {what}", type="internal_error", code="engine_failed")
