"""The server under test: finds its model and the request features that it supports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from orchestrator.bench.dialect import FEATURES, Dialect, Prompt
from orchestrator.bench.measurement import Measured
from orchestrator.bench.prompts import Prompts, Scale
from orchestrator.bench.response_reader import error_message, measured
from orchestrator.bench.timed_http import Answer, Client, Origin
from orchestrator.process.failure import Failed

ASK_S = 30.0  # timeout of requests without inference
TRIES = 8  # attempts to match a number of tokens with a text
FEW, MANY = 40, 120  # words
REFUSALS = (400, 422)
_KEY_HINT = "set --api-key or OPENAI_API_KEY"
_MODEL_HINT = "choose one with --model NAME"
_HINTS = {401: _KEY_HINT, 403: _KEY_HINT, 404: "try --chat, or check --url"}


@dataclass
class Target:
    """One model of one server, created by ``find``."""

    client: Client
    model: str
    max_len: int | None  # prompt and output tokens together, if the server reports it
    dialect: Dialect
    prompts: Prompts
    timeout_s: float
    scale: Scale | None = None  # for texts, if token ids are refused

    @classmethod
    async def find(
        cls, client: Client, model: str | None, *, chat: bool, seed: int, timeout_s: float, say: Callable[[str], None]
    ) -> Target:
        """Finds the model and the supported features of the server. Raises Failed `bench-unreachable`,
        `bench-model-unknown` or `bench-refused`."""
        name, max_len = await model_of(client, model)
        target = cls(client, name, max_len, Dialect(chat, not chat), Prompts(seed), timeout_s)
        await target._find_features()
        if not target.dialect.token_ids:
            target.scale = await target._measure_scale()
        for what in target.dialect.refused:
            say(f"the server refuses {what}")
        return target

    def prompt(self, index: int, tokens: int) -> Prompt:
        """Returns a prompt of ``tokens`` tokens: exact as token ids, approximate as text."""
        if self.scale is None:
            return self.prompts.ids(index, tokens)
        return self.prompts.text(index, self.scale.words(tokens))

    async def exact_prompt(self, index: int, tokens: int) -> tuple[Prompt, int]:
        """Like ``prompt``, with its number of tokens: adjusts a text until the server counts ``tokens``, or as close as
        whole words allow."""
        if self.scale is None:
            return self.prompts.ids(index, tokens), tokens
        words, tried = self.scale.words(tokens), dict[int, int]()
        for _ in range(TRIES):
            if words in tried:
                break
            tried[words] = await self._count(self.prompts.text(index, words))
            if tried[words] == tokens:
                break
            step = round((tokens - tried[words]) / self.scale.per_word)
            words = max(1, words + (step or (1 if tried[words] < tokens else -1)))
        words = min(tried, key=lambda count: abs(tried[count] - tokens))
        return self.prompts.text(index, words), tried[words]

    def body(self, prompt: Prompt, output: int) -> bytes:
        return self.dialect.body(self.model, prompt, output)

    async def ask(self, body: bytes, *, due: float, prompt: int, output: int) -> Measured:
        """Sends one streamed request. Never raises."""
        answer = await self.client.ask("POST", self.dialect.path, body, self.timeout_s)
        return measured(answer, due=due, prompt=prompt, output=output)

    async def _find_features(self) -> None:
        """Finds the features that the server supports.

        Drops one feature after the other while the server replies 400 or 422; then retries each dropped one, since
        another feature may have been the cause.
        """
        answer = await self._try(self.dialect)
        dropped = []
        for name in [name for name in FEATURES if getattr(self.dialect, name)]:
            if answer.status not in REFUSALS:
                break
            self.dialect = self.dialect.without(name)
            dropped.append(name)
            answer = await self._try(self.dialect)
        if answer.error or answer.status != 200:
            why = answer.what or error_message(answer.body)
            what = f"{self.dialect.path} of {self.client.origin.url}: {answer.status or answer.error}: {why}"
            raise Failed("bench-refused", what, _HINTS.get(answer.status, "see the server's log"))
        for name in dropped[:-1]:
            trial = replace(self.dialect, **{name: True})
            if (await self._try(trial)).status == 200:
                self.dialect = trial

    async def _try(self, dialect: Dialect) -> Answer:
        prompt: Prompt = self.prompts.ids(-1, 8) if dialect.token_ids else self.prompts.text(-1, 8)
        return await self.client.ask("POST", dialect.path, dialect.body(self.model, prompt, 2), self.timeout_s)

    async def _measure_scale(self) -> Scale:
        few = await self._count(self.prompts.text(-1, FEW))
        many = await self._count(self.prompts.text(-1, MANY))
        try:
            return Scale.through((FEW, few), (MANY, many))
        except ValueError as error:
            raise Failed("bench-refused", f"the server does not count prompt tokens: {error}", _MODEL_HINT) from None

    async def _count(self, text: str) -> int:
        """Returns the server's count of a prompt's tokens: from `/tokenize` if it has that route, else from the usage
        of a one-token response. Raises Failed."""
        fields: dict[str, Any] = {"model": self.model}
        fields |= {"messages": [{"role": "user", "content": text}]} if self.dialect.chat else {"prompt": text}
        answer = await self.client.ask("POST", "/tokenize", msgspec.json.encode(fields), ASK_S)
        count = _field(answer, "count")
        if isinstance(count, int):
            return count
        body = self.dialect.body(self.model, text, 1, stream=False)
        answer = await self.client.ask("POST", self.dialect.path, body, self.timeout_s)
        usage = _field(answer, "usage")
        count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if not isinstance(count, int):
            status = answer.status or answer.error
            what = f"{self.client.origin.url} does not count tokens: {status}, {error_message(answer.body)}"
            raise Failed("bench-refused", what, "the server must return `usage`")
        return count


async def model_of(client: Client, model: str | None) -> tuple[str, int | None]:
    """Returns the name of the model, or of the only one without a name, and its length if the server reports it. Raises
    Failed `bench-unreachable` or `bench-model-unknown`."""
    served = await _models(client)
    if model is None and len(served) != 1:
        names = ", ".join(served) or "none"
        raise Failed("bench-model-unknown", f"{client.origin.url} serves {names}", _MODEL_HINT)
    name = next(iter(served)) if model is None else model
    if served and name not in served:
        what = f"{client.origin.url} does not serve {name!r}, but {', '.join(served)}"
        raise Failed("bench-model-unknown", what, _MODEL_HINT)
    return name, served.get(name)


async def _models(client: Client) -> dict[str, int | None]:
    """Returns the models of `/v1/models`, with their lengths if the server reports them; empty without that route."""
    answer = await client.ask("GET", "/v1/models", None, ASK_S)
    if answer.error:
        what = f"{client.origin.url} does not answer: {answer.what or answer.error}"
        raise Failed(
            "bench-unreachable",
            what,
            "check that it is running, and --url; for a private CA, set SSL_CERT_FILE",
        )
    if answer.status in (401, 403):
        what = f"{client.origin.url}: {answer.status}: {error_message(answer.body)}"
        raise Failed("bench-refused", what, _KEY_HINT)
    data = _field(answer, "data")
    lengths: dict[str, int | None] = {}
    for entry in data if isinstance(data, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("id"), str):
            length = entry.get("max_model_len")
            lengths[entry["id"]] = length if isinstance(length, int) and length > 1 else None
    return lengths


def _field(answer: Answer, name: str) -> Any:
    """Returns a field of a JSON object in a response; None for anything else."""
    if answer.error or answer.status != 200:
        return None
    try:
        fields = msgspec.json.decode(answer.body)
    except msgspec.DecodeError:
        return None
    return fields.get(name) if isinstance(fields, dict) else None


def origin(url: str) -> Origin:
    """Parses --url. Raises Failed `bench-url-wrong`."""
    try:
        return Origin.parse(url)
    except ValueError as error:
        raise Failed("bench-url-wrong", str(error), "use a URL like http://127.0.0.1:8080") from None
