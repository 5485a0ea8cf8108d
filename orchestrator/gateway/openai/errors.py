"""What a client did wrong, or what we cannot do now, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

LONGEST_MESSAGE = 1000  # it may repeat what the client has sent, which may be megabytes
LONGEST_PARAM = 200


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
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= LONGEST_MESSAGE else message[:LONGEST_MESSAGE] + "..."
        self.type = type
        self.code = code
        self.param = None if param is None else param[:LONGEST_PARAM]
        self.retry_after_s = retry_after_s
        self.allow = allow  # the methods that the route has

    def body(self) -> dict[str, Any]:
        """`{"error": {...}}`."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        found = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.allow is not None:
            found["Allow"] = self.allow
        if self.status == 401:
            found["WWW-Authenticate"] = "Bearer"
        return found


def _too_many(message: str, *, code: str, retry_after_s: int) -> ApiError:
    """The client may come again."""
    return ApiError(429, message, type="rate_limit_error", code=code, retry_after_s=retry_after_s)


def _unavailable(message: str, *, code: str, retry_after_s: int) -> ApiError:
    """We cannot serve it now."""
    return ApiError(503, message, type="service_unavailable", code=code, retry_after_s=retry_after_s)


def _span(seconds: float) -> str:
    """ "2.5 s", and below a second "5 ms"."""
    return f"{seconds:.1f} s" if seconds >= 0.9995 else f"{max(0.0, seconds) * 1000:.3g} ms"


def invalid(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def model_not_found(name: str, known: list[str]) -> ApiError:
    message = f"The model {name[:LONGEST_PARAM]!r} does not exist here. Models: {', '.join(sorted(known)) or 'none'}."
    return ApiError(404, message, param="model", code="model_not_found")


def too_long(
    param: str, prompt: int, max_tokens: int | None, max_len: int, max_prompt: int, *, exact: bool = True
) -> ApiError:
    """The prompt (the parameter ``param``), alone or with the tokens asked for, is longer than the model allows. Not
    ``exact``: it has more than ``prompt`` tokens, which are at least ``max_prompt``."""
    if prompt > max_prompt or not exact:
        length = f"{'' if exact else 'more than '}{prompt}"
        what = f"This model takes prompts of at most {max_prompt} tokens; this one has {length}."
    elif max_tokens is None:
        what = f"This model's maximum context length is {max_len} tokens; the prompt of {prompt} leaves no room."
    else:
        what = (
            f"This model's maximum context length is {max_len} tokens; you asked for {prompt + max_tokens} "
            f"({prompt} in the prompt, {max_tokens} to generate)."
        )
    at_fault = param if max_tokens is None or prompt > max_prompt or not exact else "max_tokens"
    return ApiError(400, what, param=at_fault, code="context_length_exceeded")


def body_too_large(limit: int) -> ApiError:
    return ApiError(413, f"The request's body is over the limit of {limit} bytes.", code="body_too_large")


def too_many_messages(given: int, limit: int) -> ApiError:
    message = f"messages: {given} are more than the limit of {limit}."
    return ApiError(400, message, param="messages", code="too_many_messages")


def too_many_choices(given: int, room: int) -> ApiError:
    message = f"The prompts times n are {given} answers; this model has slots and places in its queue for {room}."
    return ApiError(400, message, param="n", code="too_many_choices")


def headers_too_large(limit: int) -> ApiError:
    message = f"The request line and headers are over the limit of {limit} bytes, or more than a hundred."
    return ApiError(431, message, code="headers_too_large")


def not_http(what: str) -> ApiError:
    return ApiError(400, f"This is no HTTP request: {what}.", code="malformed_http")


def unknown_encoding(header: str, given: bytes) -> ApiError:
    message = f"The {header} {given.decode('latin-1')!r} is not understood; send the body as it is."
    return ApiError(415 if header == "content-encoding" else 400, message, code="unsupported_encoding")


def request_timeout(limit_s: float) -> ApiError:
    message = f"The request was not complete after {limit_s:g} s."
    return ApiError(408, message, code="request_timeout")


def route_not_found(path: str) -> ApiError:
    return ApiError(404, f"There is no route {path}.", code="route_not_found")


def method_not_allowed(method: str, path: str, allowed: str) -> ApiError:
    return ApiError(405, f"{method} is not for {path}; {allowed} is.", code="method_not_allowed", allow=allowed)


def invalid_api_key(given: bool) -> ApiError:
    how = "send one as `Authorization: Bearer KEY` or `x-api-key: KEY`"
    message = "The API key is not valid here, or it has expired." if given else f"An API key is needed: {how}."
    return ApiError(401, message, type="authentication_error", code="invalid_api_key")


def key_not_for(what: str) -> ApiError:
    """The key is good, but not for this. ``what`` such as "the model 'x'"."""
    return ApiError(403, f"This API key is not for {what}.", type="permission_error", code="key_not_allowed")


def origin_not_allowed(origin: str) -> ApiError:
    message = (
        f"Scripts of {origin} may not use this address; cors_origins of the gateway's settings names those that may."
    )
    return ApiError(403, message, type="permission_error", code="origin_not_allowed")


def too_many_connections(limit: int, of_key: bool = False) -> ApiError:
    whose = "with this API key" if of_key else "to this gateway"
    message = f"There are more than {limit} connections {whose}. Try again in 1 s."
    made = _too_many if of_key else _unavailable
    return made(message, code="too_many_connections", retry_after_s=1)


def too_much_at_once() -> ApiError:
    message = "Too many large requests are being read. Try again in 1 s."
    return _unavailable(message, code="too_many_bodies", retry_after_s=1)


def too_much_to_tokenize() -> ApiError:
    message = "Too many long prompts of this API key wait to be tokenized. Try again in 1 s."
    return _too_many(message, code="rate_limit_exceeded", retry_after_s=1)


def too_many_tokens(param: str, count: int, limit: int) -> ApiError:
    """For what is tokenized, or made text again, without being a prompt."""
    message = f"{param}: more than {max(count - 1, limit)} tokens; at most {limit} are tokenized for this model."
    return ApiError(400, message, param=param, code="context_length_exceeded")


def our_fault() -> ApiError:
    return ApiError(500, "The gateway failed; its log says how.", type="internal_error", code="internal_error")


def wrong_content_type(given: str) -> ApiError:
    message = f"The body's content type is {given!r}; it must be 'application/json'."
    return ApiError(415, message, code="unsupported_media_type")


def queue_full(model: str, why: str, retry_after_s: int) -> ApiError:
    message = f"The queue of {model!r} is full: {why}. Try again in {retry_after_s} s."
    return _too_many(message, code="queue_full", retry_after_s=retry_after_s)


def deadline_unreachable(model: str, wait_s: float, allowed_s: float, retry_after_s: int) -> ApiError:
    """Told at once, instead of after the wait."""
    wait, wanted = "without end" if wait_s == float("inf") else _span(wait_s), _span(allowed_s)
    message = (
        f"A request to {model!r} would wait {wait} for a slot, and its first token is wanted within {wanted}. "
        f"Try again in {retry_after_s} s."
    )
    return _too_many(message, code="deadline_unreachable", retry_after_s=retry_after_s)


def deadline_exceeded(model: str, waited_s: float) -> ApiError:
    message = f"The request has waited {_span(waited_s)} for a slot of {model!r}; its deadline has passed."
    return ApiError(504, message, type="timeout_error", code="deadline_exceeded")


def model_unavailable(model: str, state: str, reason: str | None) -> ApiError:
    """No replica of the model can serve now."""
    code = "model_loading" if state == "loading" else "model_unavailable"
    message = f"The model {model!r} is {state}" + (f": {reason}" if reason else "") + "."
    return _unavailable(message, code=code, retry_after_s=2 if state == "loading" else 10)


def replica_lost(model: str) -> ApiError:
    message = f"The replica of {model!r} that worked on this request is gone. Send it again."
    return _unavailable(message, code="replica_lost", retry_after_s=1)


def tokenizer_unavailable(cause: object) -> ApiError:
    message = f"The model's tokenizer cannot be loaded: {cause}"
    return _unavailable(message, code="tokenizer_unavailable", retry_after_s=10)


def tokenizer_failed(model: str, cause: object) -> ApiError:
    message = f"The tokenizer or chat template of {model!r} failed: {cause}"
    return ApiError(500, message, type="internal_error", code="tokenizer_failed")


def engine_failed(model: str, what: str) -> ApiError:
    return ApiError(500, f"The engine of {model!r} failed: {what}", type="internal_error", code="engine_failed")


def rate_limited(what: str, limit: int, used: int, asked: int, retry_after_s: int) -> ApiError:
    """A limit of the API key. ``what`` such as "tokens per minute"."""
    message = (
        f"This API key's limit of {limit} {what} is reached: {used} are used, the request needs {asked}. "
        f"Try again in {retry_after_s} s."
    )
    return _too_many(message, code="rate_limit_exceeded", retry_after_s=retry_after_s)


def too_many_concurrent(limit: int, retry_after_s: int) -> ApiError:
    message = (
        f"This API key may have {limit} requests at a time, and has them. Wait for one to end, or try again in "
        f"{retry_after_s} s."
    )
    return _too_many(message, code="rate_limit_exceeded", retry_after_s=retry_after_s)


def over_rate_limit(tokens: int, limit: int) -> ApiError:
    """No 429: clients send those again by themselves, and this request can never pass."""
    message = (
        f"This API key's limit is {limit} tokens per minute, and the request may use {tokens} at once. "
        "Send a lower max_tokens or a shorter prompt."
    )
    return ApiError(400, message, param="max_tokens", code="over_rate_limit")
