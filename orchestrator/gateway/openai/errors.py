"""The errors of the gateway, in OpenAI's shape."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from orchestrator.dispatch.wait_prediction import retry_after_s
from placements.engines.registry import ENGINES
from placements.facts.plural import joined

MAX_MESSAGE_CHARACTERS = 1000  # a message may quote the client's input, which may be megabytes
MAX_PARAM_CHARACTERS = 200
_OF_CLIENTS = (400, 404, 405, 413, 415)  # statuses of a server that clients get


class ApiError(Exception):
    """An error answer, made by the functions below. Codes are part of the API."""

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
        self.message = message if len(message) <= MAX_MESSAGE_CHARACTERS else message[:MAX_MESSAGE_CHARACTERS] + "..."
        self.type = type
        self.code = code
        self.param = None if param is None else param[:MAX_PARAM_CHARACTERS]
        self.retry_after_s = retry_after_s
        self.allow = allow  # the methods of the route
        self.decision: bytes | None = None  # the value of `x-corewright-decision`, if the client requested it
        self.in_messages: str | None = None  # the message in the words of Anthropic's API, where clients read it

    def body(self) -> dict[str, Any]:
        """Returns the JSON value, `{"error": {...}}`."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def rename(self, names: Mapping[str, str]) -> None:
        """Names the field as the client has sent it. ``names``: of OpenAI's fields, in the client's API."""
        field = self.param
        if field is not None and field in names:
            self.param = names[field]
            pattern = rf"\b{field}\b" if "_" in field else rf"^{field}\b|\b{field}(?=[:\[])"  # others are also words
            self.message = re.sub(pattern, self.param, self.message, count=1)

    def explained(self, decision: bytes) -> ApiError:
        """Returns the error for a client that requested the decision."""
        error = ApiError(
            self.status,
            self.message,
            type=self.type,
            code=self.code,
            param=self.param,
            retry_after_s=self.retry_after_s,
            allow=self.allow,
        )
        error.decision, error.in_messages = decision, self.in_messages
        return error

    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.allow is not None:
            headers["Allow"] = self.allow
        if self.decision is not None:
            headers["x-corewright-decision"] = self.decision.decode()
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors of the block name the fields that the client has sent."""
    try:
        yield
    except ApiError as error:
        error.rename(names)
        raise


def _too_many(message: str, *, code: str, retry_after_s: int) -> ApiError:
    """A 429, to be retried later."""
    return ApiError(429, message, type="rate_limit_error", code=code, retry_after_s=retry_after_s)


def _unavailable(message: str, *, code: str, retry_after_s: int) -> ApiError:
    """A 503, to be retried later."""
    return ApiError(503, message, type="service_unavailable", code=code, retry_after_s=retry_after_s)


def _span(seconds: float) -> str:
    """Returns a duration such as "2.5 s", and below a second "5 ms"."""
    return f"{seconds:.1f} s" if seconds >= 0.9995 else f"{max(0.0, seconds) * 1000:.3g} ms"


def invalid(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def request_cancelled() -> ApiError:
    """Not a status that clients retry by themselves."""
    return ApiError(403, "An operator has cancelled this request.", code="request_cancelled")


def model_not_found(name: str, models: list[str]) -> ApiError:
    message = (
        f"The model {name[:MAX_PARAM_CHARACTERS]!r} does not exist. Models: {', '.join(sorted(models)) or 'none'}."
    )
    return ApiError(404, message, param="model", code="model_not_found")


def too_long(
    param: str, prompt: int, max_tokens: int | None, max_len: int, max_prompt: int, *, exact: bool = True
) -> ApiError:
    """The prompt (the parameter ``param``), alone or with the requested tokens, is longer than the model allows. With
    ``exact`` false it has more than ``prompt`` tokens, and ``prompt`` is at least ``max_prompt``."""
    if prompt > max_prompt or not exact:
        length = f"{'' if exact else 'more than '}{prompt}"
        message = f"This model takes prompts of at most {max_prompt} tokens; this one has {length}."
    elif max_tokens is None:
        message = f"This model's maximum context length is {max_len} tokens; the prompt of {prompt} leaves no room."
    else:
        message = (
            f"This model's maximum context length is {max_len} tokens; you requested {prompt + max_tokens} "
            f"({prompt} in the prompt, {max_tokens} to generate)."
        )
    wrong_param = param if max_tokens is None or prompt > max_prompt or not exact else "max_tokens"
    error = ApiError(400, message, param=wrong_param, code="context_length_exceeded")
    least, most = prompt if exact else prompt + 1, min(max_prompt, max_len - 1)
    error.in_messages = f"prompt is too long: {least} tokens > {most} maximum"  # Claude Code then compacts the chat
    return error


def rejected_by_server(status: int, message: str) -> ApiError:
    """The server of a model has rejected a forwarded request; it checks the request itself."""
    return ApiError(status if status in _OF_CLIENTS else 400, message, code="rejected_by_server")


ROUTES_OF_KIND = {
    "generate": "/v1/chat/completions and /v1/completions",
    "embedding": "/v1/embeddings and /v1/score",
    "rerank": "/v1/rerank and /v1/score",
    "classification": "/classify",
}


def other_kind(name: str, kind: str, route: str) -> ApiError:
    """The model is of a kind that does not have the route."""
    message = f"The model {name!r} is of kind {kind}: it has {ROUTES_OF_KIND[kind]}, and not {route}."
    return ApiError(400, message, param="model", code="route_not_served")


def prompts_not_scored(name: str, engine: str, field: str) -> ApiError:
    """The model's engine does not compute the logits of prompts."""
    able = joined([name for name, engine in ENGINES.items() if engine.scores_prompts], "or")
    message = (
        f"The engine {engine} of the model {name!r} does not compute the logprobs of prompts, which {field} requests; "
        f"send the request to a model with the engine {able}."
    )
    return ApiError(400, message, param=field, code="unsupported_parameter")


def not_forwarded(name: str, route: str) -> ApiError:
    """The model's server gets the clients' own bodies, and this route needs a translation."""
    message = f"The model {name!r} has a server of its own: it has {ROUTES_OF_KIND['generate']}, and not {route}."
    return ApiError(400, message, param="model", code="route_not_served")


def input_too_long(param: str, position: int, count: int, limit: int, *, exact: bool) -> ApiError:
    """The input at that place is too long. With ``exact`` false it has more than ``count`` tokens."""
    length = f"{'' if exact else 'more than '}{count}"
    message = (
        f"This model takes inputs of at most {limit} tokens; {param}[{position}] has {length}. "
        "Send a shorter one, or truncate: true."
    )
    return ApiError(400, message, param=param, code="context_length_exceeded")


def body_too_large(limit: int) -> ApiError:
    return ApiError(413, f"The request body is over the limit of {limit} bytes.", code="body_too_large")


def too_many_messages(count: int, limit: int) -> ApiError:
    message = f"messages: {count} messages exceed the limit of {limit}."
    return ApiError(400, message, param="messages", code="too_many_messages")


def too_many_choices(count: int, room: int) -> ApiError:
    message = f"The prompts times n are {count} answers; this model has slots and queue places for {room}."
    return ApiError(400, message, param="n", code="too_many_choices")


def headers_too_large(limit: int) -> ApiError:
    message = f"The request line and headers exceed {limit} bytes, or there are more than 100 headers."
    return ApiError(431, message, code="headers_too_large")


def not_http(cause: str) -> ApiError:
    return ApiError(400, f"This is not a valid HTTP request: {cause}.", code="malformed_http")


def unknown_encoding(header: str, encoding: bytes) -> ApiError:
    message = f"The {header} {encoding.decode('latin-1')!r} is not supported; send the body without it."
    return ApiError(415 if header == "content-encoding" else 400, message, code="unsupported_encoding")


def request_timeout(limit_s: float) -> ApiError:
    message = f"The request was not complete after {limit_s:g} s."
    return ApiError(408, message, code="request_timeout")


def route_not_found(path: str) -> ApiError:
    return ApiError(404, f"There is no route {path}.", code="route_not_found")


def method_not_allowed(method: str, path: str, allowed: str) -> ApiError:
    message = f"{method} is not allowed for {path}" + (f"; use {allowed}." if allowed else ".")
    return ApiError(405, message, code="method_not_allowed", allow=allowed)


def invalid_api_key(presented: bool) -> ApiError:
    hint = "send one as `Authorization: Bearer KEY` or `x-api-key: KEY`"
    message = "The API key is not valid, or it has expired." if presented else f"An API key is required: {hint}."
    return ApiError(401, message, type="authentication_error", code="invalid_api_key")


def two_api_keys() -> ApiError:
    message = "Authorization and x-api-key have different API keys: send one of them."
    return ApiError(401, message, type="authentication_error", code="invalid_api_key")


def key_not_for(target: str) -> ApiError:
    """The key is valid, but does not allow ``target``, such as "the model 'x'"."""
    return ApiError(403, f"This API key does not allow {target}.", type="permission_error", code="key_not_allowed")


def origin_not_allowed(origin: str) -> ApiError:
    message = f"Scripts of {origin} may not use this address; allowed are cors_origins of the gateway's settings."
    return ApiError(403, message, type="permission_error", code="origin_not_allowed")


def too_many_connections(limit: int, of_key: bool = False) -> ApiError:
    scope = "with this API key" if of_key else "to this gateway"
    message = f"There are more than {limit} connections {scope}. Try again in 1 s."
    make = _too_many if of_key else _unavailable
    return make(message, code="too_many_connections", retry_after_s=1)


def too_many_bodies() -> ApiError:
    message = "Too many large requests are being read. Try again in 1 s."
    return _unavailable(message, code="too_many_bodies", retry_after_s=1)


def too_many_long_prompts() -> ApiError:
    message = "Too many long prompts of this API key are waiting to be tokenized. Try again in 1 s."
    return _too_many(message, code="rate_limit_exceeded", retry_after_s=1)


def too_many_tokens(param: str, count: int, limit: int) -> ApiError:
    """A request to /tokenize or /detokenize is too long."""
    message = f"{param}: more than {max(count - 1, limit)} tokens; the limit for this model is {limit}."
    return ApiError(400, message, param=param, code="context_length_exceeded")


def internal_error() -> ApiError:
    message = "The gateway failed; the cause is in its log."
    return ApiError(500, message, type="internal_error", code="internal_error")


def wrong_content_type(content_type: str, other: str = "") -> ApiError:
    """``other``: another content type that the route takes."""
    wanted = "'application/json'" + (f" or {other!r}" if other else "")
    message = f"The body's content type is {content_type!r}; it must be {wanted}."
    return ApiError(415, message, code="unsupported_media_type")


def queue_full(model: str, cause: str, retry_after_s: int) -> ApiError:
    message = f"The queue of {model!r} is full: {cause}. Try again in {retry_after_s} s."
    return _too_many(message, code="queue_full", retry_after_s=retry_after_s)


def deadline_unreachable(model: str, wait_s: float, allowed_s: float, retry_after_s: int) -> ApiError:
    """The predicted wait is longer than the deadline; returned at once instead of after the wait."""
    wait = "forever" if wait_s == float("inf") else _span(wait_s)
    message = (
        f"A request to {model!r} would wait {wait} for a slot, but its deadline is in {_span(allowed_s)}. "
        f"Try again in {retry_after_s} s."
    )
    return _too_many(message, code="deadline_unreachable", retry_after_s=retry_after_s)


def deadline_exceeded(model: str, waited_s: float) -> ApiError:
    message = f"The request waited {_span(waited_s)} for a slot of {model!r}; its deadline has passed."
    return ApiError(504, message, type="timeout_error", code="deadline_exceeded")


def model_unavailable(model: str, state: str, reason: str | None, ready_in_s: float | None = None) -> ApiError:
    """No replica of the model can serve now. ``ready_in_s``: when one is expected to; None: unknown."""
    code = "model_loading" if state == "loading" else "model_unavailable"
    message = f"The model {model!r} is {state}" + (f": {reason}" if reason else "") + "."
    if ready_in_s is None:
        return _unavailable(message, code=code, retry_after_s=2 if state == "loading" else 10)
    message += f" It is expected to be ready in about {math.ceil(ready_in_s)} s."
    return _unavailable(message, code=code, retry_after_s=retry_after_s(ready_in_s))


def replica_lost(model: str) -> ApiError:
    message = f"The replica of {model!r} that processed this request was lost. Send the request again."
    return _unavailable(message, code="replica_lost", retry_after_s=1)


def server_unavailable(model: str, cause: str) -> ApiError:
    """The server of a replica has not begun the request, also when it was retried."""
    message = f"The server of {model!r} did not begin this request: {cause}"
    return _unavailable(message, code="server_unavailable", retry_after_s=1)


def tokenizer_unavailable(cause: object) -> ApiError:
    message = f"The model's tokenizer cannot be loaded: {cause}"
    return _unavailable(message, code="tokenizer_unavailable", retry_after_s=10)


def tokenizer_busy(model: str, cause: object) -> ApiError:
    message = f"The tokenizer of {model!r} is overloaded: {cause}. Try again in 2 s."
    return _unavailable(message, code="tokenizer_busy", retry_after_s=2)


def tokenizer_failed(model: str, cause: object) -> ApiError:
    message = f"The tokenizer or chat template of {model!r} failed: {cause}"
    return ApiError(500, message, type="internal_error", code="tokenizer_failed")


def engine_failed(model: str, cause: str) -> ApiError:
    return ApiError(500, f"The engine of {model!r} failed: {cause}", type="internal_error", code="engine_failed")


def rate_limited(unit: str, limit: int, used: int, needed: int, retry_after_s: int) -> ApiError:
    """A limit of the API key is reached. ``unit`` such as "tokens per minute"."""
    message = (
        f"This API key's limit of {limit} {unit} is reached: {used} are used, the request needs {needed}. "
        f"Try again in {retry_after_s} s."
    )
    return _too_many(message, code="rate_limit_exceeded", retry_after_s=retry_after_s)


def too_many_concurrent(limit: int, retry_after_s: int) -> ApiError:
    message = (
        f"This API key's limit of {limit} requests at a time is reached. Wait for one to end, or try again in "
        f"{retry_after_s} s."
    )
    return _too_many(message, code="rate_limit_exceeded", retry_after_s=retry_after_s)


def over_rate_limit(tokens: int, limit: int) -> ApiError:
    """Not a 429: clients retry those automatically, and this request can never pass."""
    message = (
        f"This API key's limit is {limit} tokens per minute, but the request may use {tokens} at once. "
        "Send a lower max_tokens or a shorter prompt."
    )
    return ApiError(400, message, param="max_tokens", code="over_rate_limit")
