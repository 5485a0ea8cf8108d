"""The server that is measured, and what it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from orchestrator.bench.dialect import WHAT, Dialect, Prompt
from orchestrator.bench.measurement import Measured
from orchestrator.bench.prompts import Prompts, Scale
from orchestrator.bench.response_reader import measured, said
from orchestrator.bench.timed_http import Answer, Client, Origin
from orchestrator.process.failure import Failed

ASK_S = 30.0  # for what no model has to think about
TRIES = 8  # to hit a number of tokens with a text
FEW, MANY = 40, 120  # words
REFUSALS = (400, 422)
_KEY_HINT = "--api-key, or OPENAI_API_KEY"
_HINTS = {401: _KEY_HINT, 403: _KEY_HINT, 404: "--chat, or --url"}


@dataclass
class Target:
    """One model of one server. ``find`` makes it."""

    client: Client
    model: str
    max_len: int | None  # tokens of prompt and answer together, where the server tells
    dialect: Dialect
    prompts: Prompts
    timeout_s: float
    scale: Scale | None = None  # of texts, where token ids are refused

    @classmethod
    async def find(
        cls, client: Client, model: str | None, *, chat: bool, seed: int, timeout_s: float, say: Callable[[str], None]
    ) -> Target:
        """Ask the server what it serves and what it takes. Raises Failed `bench-unreachable`, `bench-model-unknown` or
        `bench-refused`."""
        served = await _models(client)
        if model is None and len(served) != 1:
            names = ", ".join(served) or "none"
            raise Failed("bench-model-unknown", f"{client.origin.url} serves {names}", "--model NAME")
        name = next(iter(served)) if model is None else model
        if served and name not in served:
            what = f"{client.origin.url} does not serve {name!r}, but {', '.join(served)}"
            raise Failed("bench-model-unknown", what, "--model NAME")
        target = cls(client, name, served.get(name), Dialect(chat, not chat), Prompts(seed), timeout_s)
        await target._agree()
        if not target.dialect.token_ids:
            target.scale = await target._measure_scale()
        for what in target.dialect.refused:
            say(f"the server refuses {what}")
        return target

    def prompt(self, index: int, tokens: int) -> Prompt:
        """Of ``tokens`` tokens: exactly as token ids, about so many as text."""
        if self.scale is None:
            return self.prompts.ids(index, tokens)
        return self.prompts.text(index, self.scale.words(tokens))

    async def exact_prompt(self, index: int, tokens: int) -> tuple[Prompt, int]:
        """As ``prompt``, with the number of its tokens: a text is changed until the server counts ``tokens``, or as
        near as whole words get."""
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
        """One streamed request. Raises nothing."""
        answer = await self.client.ask("POST", self.dialect.path, body, self.timeout_s)
        return measured(answer, due=due, prompt=prompt, output=output)

    async def _agree(self) -> None:
        """Find the fields that the server takes.

        What it refuses with 400 or 422 is given up, one after the other, until it answers; then each that was given up
        is tried once more, since it may not have been the one to blame.
        """
        answer = await self._try(self.dialect)
        given_up = []
        for name in [name for name in WHAT if getattr(self.dialect, name)]:
            if answer.status not in REFUSALS:
                break
            self.dialect = self.dialect.without(name)
            given_up.append(name)
            answer = await self._try(self.dialect)
        if answer.error or answer.status != 200:
            why = answer.what or said(answer.body)
            what = f"{self.dialect.path} of {self.client.origin.url}: {answer.status or answer.error}: {why}"
            raise Failed("bench-refused", what, _HINTS.get(answer.status, "see the server's log"))
        for name in given_up[:-1]:
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
            raise Failed("bench-refused", f"the server counts no tokens of a prompt: {error}", "--model NAME") from None

    async def _count(self, text: str) -> int:
        """Tokens of a prompt as the server counts them: `/tokenize` where there is one, else the usage of an answer of
        one token. Raises Failed."""
        asked: dict[str, Any] = {"model": self.model}
        asked |= {"messages": [{"role": "user", "content": text}]} if self.dialect.chat else {"prompt": text}
        answer = await self.client.ask("POST", "/tokenize", msgspec.json.encode(asked), ASK_S)
        count = _field(answer, "count")
        if isinstance(count, int):
            return count
        body = self.dialect.body(self.model, text, 1, stream=False)
        answer = await self.client.ask("POST", self.dialect.path, body, self.timeout_s)
        usage = _field(answer, "usage")
        count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if not isinstance(count, int):
            what = f"{self.client.origin.url} counts no tokens: {answer.status or answer.error}, {said(answer.body)}"
            raise Failed("bench-refused", what, "a server whose answers have `usage`")
        return count


async def _models(client: Client) -> dict[str, int | None]:
    """The models of `/v1/models`, with their lengths where the server tells; empty where there is no such route."""
    answer = await client.ask("GET", "/v1/models", None, ASK_S)
    if answer.error:
        what = f"{client.origin.url} does not answer: {answer.what or answer.error}"
        raise Failed(
            "bench-unreachable",
            what,
            "is it running? see --url; SSL_CERT_FILE names the authority of a certificate of your own",
        )
    if answer.status in (401, 403):
        what = f"{client.origin.url}: {answer.status}: {said(answer.body)}"
        raise Failed("bench-refused", what, _KEY_HINT)
    data = _field(answer, "data")
    found: dict[str, int | None] = {}
    for entry in data if isinstance(data, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("id"), str):
            length = entry.get("max_model_len")
            found[entry["id"]] = length if isinstance(length, int) and length > 1 else None
    return found


def _field(answer: Answer, name: str) -> Any:
    """A field of a JSON object that was answered; None for anything else."""
    if answer.error or answer.status != 200:
        return None
    try:
        told = msgspec.json.decode(answer.body)
    except msgspec.DecodeError:
        return None
    return told.get(name) if isinstance(told, dict) else None


def origin(url: str) -> Origin:
    """Raises Failed `bench-url-wrong`."""
    try:
        return Origin.parse(url)
    except ValueError as error:
        raise Failed("bench-url-wrong", str(error), "--url http://127.0.0.1:8080") from None
