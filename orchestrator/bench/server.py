"""The server under test: finds its model, and completes prompts of a given number of words."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

import aiohttp
import msgspec

from orchestrator.process.failure import Failed

CONNECT_S = 10.0
MODELS_S = 30.0  # timeout of the list of models
MAX_MESSAGE_CHARS = 300
REFUSALS = (400, 422)
EXTENSIONS = (("ignore_eos", "min_tokens"), ("ignore_eos",), ("min_tokens",), ())  # tried until one is accepted
# Words of two letters, one token each in common vocabularies: a text's tokens depend on the number of its words only.
WORDS = ("of", "to", "in", "is", "it", "on", "at", "by", "we", "he", "as", "so", "me", "my", "or", "an")
_KEY_HINT = "set --api-key or OPENAI_API_KEY"
_COUNT_HINT = "use a server whose `usage` has the tokens of the prompt"
_MODEL_HINT = "choose one with --model NAME"
_HINTS = {401: _KEY_HINT, 403: _KEY_HINT, 404: "try --chat, or check --url"}


class RequestFailed(Failed):
    """A request without a complete answer. ``error`` is its kind and message, ``status`` that of the response, or 0."""

    def __init__(self, request: str, status: int, error: str) -> None:
        super().__init__("bench-refused", f"{request}: {error}", _HINTS.get(status, "see the server's log"))
        self.status, self.error = status, error


class TokenUsage(msgspec.Struct, frozen=True):
    """The tokens of a complete answer, as the server counts them."""

    prompt_tokens: int
    completion_tokens: int


class Connection:
    """The connections to one server, as many as there are concurrent requests."""

    def __init__(self, session: aiohttp.ClientSession, url: SplitResult, address: str | None) -> None:
        self.url = url.geturl()
        self._session = session
        self._base, self._headers, self._certified_name = self.url, dict[str, str](), None
        if address is not None:
            host = f"[{address}]" if ":" in address else address
            netloc = host if url.port is None else f"{host}:{url.port}"
            self._base = url._replace(netloc=netloc).geturl()
            self._headers["Host"] = url.netloc
            self._certified_name = url.hostname if url.scheme == "https" else None

    async def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float
    ) -> dict[str, Any]:
        """Sends one request, and returns the JSON of its response within ``timeout_s``. Raises RequestFailed."""
        request = f"{path} of {self.url}"
        try:
            async with self._session.request(
                method,
                self._base + path,
                json=body,
                headers=self._headers,
                server_hostname=self._certified_name,
                timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S),
                allow_redirects=False,
            ) as response:
                status, content = response.status, await response.read()
        except asyncio.TimeoutError as error:  # not the builtin before Python 3.11
            fact = str(error) or f"no complete response within {timeout_s:g} s"
            raise RequestFailed(request, 0, f"timeout: {fact}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise RequestFailed(request, 0, f"connection: {str(error) or type(error).__name__}") from None
        try:
            fields = json.loads(content)
        except ValueError:
            fields = content.decode(errors="replace")
        if status != 200:
            raise RequestFailed(request, status, f"http-{status}: {_message(fields)}")
        if not isinstance(fields, dict):
            raise RequestFailed(request, status, "malformed: the response is not a JSON object")
        return fields


@asynccontextmanager
async def connected(url: str, key: str | None = None, address: str | None = None) -> AsyncIterator[Connection]:
    """Yields the connection to the server at ``url``, with or without `/v1`. ``address`` replaces the host of the URL,
    but not the name in its certificate. Raises Failed `bench-url-wrong`."""
    base = _parsed(url)
    headers = {"User-Agent": "corewright-bench"} | ({"Authorization": f"Bearer {key}"} if key else {})
    connector = aiohttp.TCPConnector(limit=0, ssl=ssl.create_default_context())
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        yield Connection(session, base, address)


def _parsed(url: str) -> SplitResult:
    """Returns the URL of a server, without `/v1` and what else a base does not have. Raises Failed."""
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0 or not url.isprintable():
            raise ValueError(f"{url!r} is not an http(s) URL")
    except ValueError as error:
        raise Failed("bench-url-wrong", str(error), "use a URL like http://127.0.0.1:8080") from None
    path = parts.path.rstrip("/").removesuffix("/v1")
    return SplitResult(parts.scheme, parts.netloc.rpartition("@")[2], path, "", "")


@dataclass(frozen=True)
class MeasuredServer:
    """One model of a server, created by ``find``."""

    connection: Connection
    model: str
    max_len: int | None  # prompt and output tokens together, if the server reports it
    chat: bool
    timeout_s: float
    extensions: tuple[str, ...]  # the accepted fields for an exact number of output tokens

    @classmethod
    async def find(cls, connection: Connection, model: str | None, *, chat: bool, timeout_s: float) -> MeasuredServer:
        """Finds the model, and the extensions that the server accepts. Raises Failed `bench-unreachable`,
        `bench-model-unknown` or `bench-refused`."""
        models = await _models(connection)
        if model is None and len(models) != 1:
            fact = f"{connection.url} serves {', '.join(models) or 'none'}"
            raise Failed("bench-model-unknown", fact, _MODEL_HINT)
        name = next(iter(models)) if model is None else model
        if models and name not in models:
            fact = f"{connection.url} does not serve {name!r}, but {', '.join(models)}"
            raise Failed("bench-model-unknown", fact, _MODEL_HINT)
        for extensions in EXTENSIONS:
            server = cls(connection, name, models.get(name), chat, timeout_s, extensions)
            try:
                await server.complete(1, 2)
                break
            except RequestFailed as failed:
                if failed.status not in REFUSALS or not extensions:
                    raise
        return server

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    @property
    def refused(self) -> tuple[str, ...]:
        return tuple(name for name in EXTENSIONS[0] if name not in self.extensions)

    async def complete(self, words: int, output: int) -> TokenUsage:
        """Completes a new prompt of so many words greedily, to ``output`` tokens. Prompts are random, so that prefix
        caches have no effect. Raises RequestFailed."""
        text = " ".join(random.choices(WORDS, k=words))
        prompt = {"messages": [{"role": "user", "content": text}]} if self.chat else {"prompt": text}
        extensions = {name: {"ignore_eos": True, "min_tokens": output}[name] for name in self.extensions}
        body = {"model": self.model, **prompt, "max_tokens": output, "temperature": 0, **extensions}
        fields = await self.connection.request("POST", self.path, body, timeout_s=self.timeout_s)
        try:
            return msgspec.convert(fields.get("usage"), TokenUsage)
        except msgspec.ValidationError as error:
            request = f"{self.path} of {self.connection.url}"
            raise RequestFailed(request, 200, f"malformed: `usage` of the response: {error}") from None

    async def prompts(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Returns for each number of tokens the number of words whose text comes closest to it, and the tokens of such
        a text, as the server counts them. Raises Failed `bench-refused`."""
        few, many = 1, max(2, max(tokens) // 3)
        base, top = [(await self.complete(words, 1)).prompt_tokens for words in (few, many)]
        if top <= base:
            fact = f"{few} words are {base} tokens, {many} words {top}"
            raise Failed("bench-refused", f"{self.connection.url} does not count prompt tokens: {fact}", _COUNT_HINT)
        per_word = (top - base) / (many - few)
        sizes = [max(1, few + round((wanted - base) / per_word)) for wanted in tokens]
        return [(words, (await self.complete(words, 1)).prompt_tokens) for words in sizes]


async def _models(connection: Connection) -> dict[str, int | None]:
    """Returns the models of `/v1/models`, with their lengths if the server reports them; empty without that route."""
    try:
        data = (await connection.request("GET", "/v1/models", timeout_s=MODELS_S)).get("data")
    except RequestFailed as failed:
        if failed.status in (401, 403):
            raise
        if failed.status:
            return {}
        hint = "check that it is running, and --url; for a private CA, set SSL_CERT_FILE"
        raise Failed("bench-unreachable", f"{connection.url} does not answer: {failed.error}", hint) from None
    cards = [card for card in data if isinstance(card, dict)] if isinstance(data, list) else []
    lengths = {str(card.get("id")): card.get("max_model_len") for card in cards}
    return {name: length if isinstance(length, int) else None for name, length in lengths.items()}


def _message(body: Any) -> str:
    """Returns the message in the body of an error response."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:MAX_MESSAGE_CHARS]
