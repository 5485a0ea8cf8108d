"""Long prompts delay their sender, and no other client."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from orchestrator.access.keys import Allowance, KeyFile
from orchestrator.gateway.http.exchange import MAX_JSON_DEPTH
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.openai.request_builder import MAX_TOKENIZED_TOKENS
from orchestrator.gateway.serving import tokenizers as module
from orchestrator.gateway.serving.tokenizers import TokenizerThreads
from orchestrator.messages.replica_states import ModelState
from orchestrator.process.home import Home
from tests.checkpoints import CHAT_TEMPLATE, save_tokenizer
from tests.fleet import until, until_async
from tests.orchestrator.gateways import LiveGateway, routes

PER_MINUTE = 10_000
NUMBERS = itertools.count()
MAX_LEN = 64
AS_JSON = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if a %}{{ a | tojson }}{% endif %}"
    "{% for message in messages %}{% for call in message.tool_calls or [] %}"
    "{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveGateway]:
    """One that serves a model whose vocabulary has merges."""
    source = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(source, CHAT_TEMPLATE + AS_JSON)
    live = LiveGateway(
        models=[routes("m", state=ModelState.LOADING, engine="cpu", source=str(source), max_len=MAX_LEN, holds=True)],
        max_messages=10,
    )
    yield live
    live.close()


Ask = Callable[..., httpx.Response]


@pytest.fixture
def ask(gateway: LiveGateway) -> Ask:
    """Posts with a new key of ``PER_MINUTE`` tokens a minute, the same for one test."""
    allowance = Allowance(tokens_per_minute=PER_MINUTE)
    _, secret = KeyFile(Home(gateway.home).keys).create(f"k{next(NUMBERS)}", allowance=allowance)

    def post(path: str, **fields: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {secret}"}
        return gateway.http.post(path, json={"model": "m", **fields}, headers=headers)

    until(lambda: gateway.http.get("/v1/models").status_code == 401, 10, "a key is required")
    until(lambda: post("/v1/completions").status_code == 400, 10, "the gateway knows the key")
    return post


def outcome(answer: httpx.Response) -> tuple[int, str | None]:
    return answer.status_code, answer.json().get("error", {}).get("code")


LONG = "hello " * 50_000  # more than a minute's tokens, and so charged as a minute's
TOO_LONG = (400, "context_length_exceeded")
LIMITED = (429, "rate_limit_exceeded")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/completions", {"prompt": [5] * 75_000}),
        ("/v1/completions", {"prompt": [LONG, "x"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
    ],
)
def test_a_prompt_that_is_far_too_long_is_charged(path: str, fields: dict[str, Any], ask: Ask) -> None:
    """It has cost the gateway time, so its sender cannot repeat it forever."""
    refused = ask(path, **fields)
    assert outcome(refused) == TOO_LONG
    assert "at most 64 tokens" in refused.json()["error"]["message"]
    assert int(refused.headers["x-ratelimit-limit-tokens"]) == PER_MINUTE
    assert outcome(ask(path, **fields)) == LIMITED


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/v1/completions", {"prompt": LONG}), ("/tokenize", {"prompt": LONG}), ("/detokenize", {"tokens": [5] * 50_000})],
)
def test_a_key_without_tokens_left_tokenizes_nothing(
    path: str, fields: dict[str, Any], ask: Ask, gateway: LiveGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert outcome(ask("/v1/completions", prompt=LONG)) == TOO_LONG
    monkeypatch.setattr(TokenizerThreads, "run", None)  # to call it would be a 500
    assert outcome(ask(path, **fields)) == LIMITED


@pytest.mark.parametrize(
    ("path", "fields"), [("/tokenize", {"prompt": LONG}), ("/detokenize", {"tokens": [5] * 50_000})]
)
def test_tokenizing_without_an_answer_is_charged(path: str, fields: dict[str, Any], ask: Ask) -> None:
    assert ask(path, **fields).status_code == 200
    assert outcome(ask(path, **fields)) == LIMITED


def test_a_short_text_is_charged_by_its_tokens(ask: Ask) -> None:
    answer = ask("/tokenize", prompt="hello")
    assert (
        int(ask("/tokenize", prompt="hello").headers["x-ratelimit-remaining-tokens"])
        >= PER_MINUTE - 20 - answer.json()["count"]
    )


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {"prompt": "⟨5⟩" * (MAX_TOKENIZED_TOKENS + 1)}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "⟨5⟩" * (MAX_TOKENIZED_TOKENS + 1)}]}, "messages"),
        ("/detokenize", {"tokens": [5] * (MAX_TOKENIZED_TOKENS + 1)}, "tokens"),
    ],
)
def test_tokenizing_alone_has_a_limit_too(path: str, fields: dict[str, Any], param: str, ask: Ask) -> None:
    error = ask(path, **fields).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)


def test_a_text_longer_than_the_context_is_tokenized(ask: Ask) -> None:
    """/tokenize is used to find out how long it is."""
    assert ask("/tokenize", prompt="hello " * 500).json()["count"] > MAX_LEN


def test_the_tokenized_messages_are_counted(ask: Ask) -> None:
    answer = ask("/tokenize", messages=[{"role": "user", "content": "hi"}] * 11)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_messages")


CHAT, MESSAGES, COUNT = "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"
HI = '"model": "m", "messages": [{"role": "user", "content": "hi"}]'
USE = '"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": @}]}]'
CALL = '"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "@"}}]}]'
WITH_JSON = {  # where a body has JSON of the client's choice, and the levels around it
    "tools": (CHAT, f'{{{HI}, "tools": [{{"type": "function", "function": {{"name": "f", "parameters": @}}}}]}}', 4),
    "template variables": (CHAT, f'{{{HI}, "chat_template_kwargs": {{"a": @}}}}', 2),
    "arguments of a tool call": (CHAT, f'{{"model": "m", {CALL}}}', 0),
    "an ignored field": (CHAT, f'{{{HI}, "metadata": @}}', 1),
    "tools of messages": (MESSAGES, f'{{{HI}, "max_tokens": 1, "tools": [{{"name": "f", "input_schema": @}}]}}', 3),
    "tools that are counted": (COUNT, f'{{{HI}, "tools": [{{"name": "f", "input_schema": @}}]}}', 3),
    "a tool use": (COUNT, f'{{"model": "m", {USE}}}', 5),
    "variables to tokenize": ("/tokenize", f'{{{HI}, "chat_template_kwargs": {{"a": @}}}}', 2),
}


def with_nested(body: str, levels: int) -> str:
    """Returns the body with an object in so many levels; in a text if the place is in one."""
    value = '{"a":' * levels + '"]"' + "}" * levels
    return body.replace('"@"', json.dumps(value)).replace("@", value)


@pytest.fixture
def post(gateway: LiveGateway) -> Callable[[str, str], httpx.Response]:
    """Posts a body with a new key without limits."""
    _, secret = KeyFile(Home(gateway.home).keys).create(f"k{next(NUMBERS)}")

    def ask(path: str, body: str) -> httpx.Response:
        return gateway.http.post(path, content=body, headers={"authorization": f"Bearer {secret}"})

    until(lambda: ask("/tokenize", "{}").status_code == 400, 10, "the gateway knows the key")
    return ask


@pytest.mark.parametrize("name", WITH_JSON)
def test_deeply_nested_json_is_rejected(
    name: str, post: Callable[[str, str], httpx.Response], caplog: pytest.LogCaptureFixture
) -> None:
    """From one level above the limit on; what the decoder accepted failed on its way to the tokenizer."""
    path, body, around = WITH_JSON[name]
    levels = (MAX_JSON_DEPTH + 1 - around, 320, 500, 900, 5000)

    answers = [post(path, with_nested(body, count)) for count in levels]

    assert [answer.status_code for answer in answers] == [400] * len(levels)
    assert [record for record in caplog.records if record.exc_info] == []


@pytest.mark.parametrize("name", [name for name, (path, _, _) in WITH_JSON.items() if path in (COUNT, "/tokenize")])
def test_json_of_the_deepest_level_is_tokenized(name: str, post: Callable[[str, str], httpx.Response]) -> None:
    path, body, around = WITH_JSON[name]

    answer = post(path, with_nested(body, MAX_JSON_DEPTH - around))

    assert answer.status_code == 200, answer.text


class Jobs:
    """Work that lasts until it is let go."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.running: list[str] = []

    def of(self, name: str) -> Callable[[], str]:
        def work() -> str:
            self.running.append(name)
            assert self.free.wait(10)
            return name

        return work


async def test_one_key_never_uses_all_threads() -> None:
    jobs, threads = Jobs(), TokenizerThreads(3)
    flood = [asyncio.create_task(threads.run("a", 1, jobs.of("a"))) for _ in range(20)]
    await until_async(lambda: len(jobs.running) == 2, 10, "two threads work for a")
    other = asyncio.create_task(threads.run("b", 1, jobs.of("b")))
    await until_async(lambda: "b" in jobs.running, 10, "the third works for b")
    jobs.free.set()
    assert await other == "b"
    assert await asyncio.gather(*flood) == ["a"] * 20
    threads.close()


async def test_a_thread_stays_in_use_until_its_work_has_ended() -> None:
    """A client that reconnects does not get a further thread each time."""
    jobs, threads = Jobs(), TokenizerThreads(2)
    cancelled = asyncio.create_task(threads.run("a", 1, jobs.of("gone")))
    await until_async(lambda: jobs.running == ["gone"], 10, "its work has begun")
    cancelled.cancel()
    back = asyncio.create_task(threads.run("a", 1, jobs.of("back")))
    other = asyncio.create_task(threads.run("b", 1, jobs.of("other")))
    await until_async(lambda: jobs.running == ["gone", "other"], 10, "the other has the second thread")
    jobs.free.set()
    assert (await back, await other) == ("back", "other")
    assert cancelled.cancelled()
    threads.close()


async def test_an_unawaited_error_is_not_logged() -> None:
    """asyncio would write a traceback for each client that disconnects after a prompt that is too long."""
    logged: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
    began, free, threads = threading.Event(), threading.Event(), TokenizerThreads(2)

    def work() -> None:
        began.set()
        free.wait(10)
        raise ValueError

    cancelled = asyncio.create_task(threads.run("a", 1, work))
    await asyncio.to_thread(began.wait, 10)
    cancelled.cancel()
    await asyncio.sleep(0)
    free.set()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    gc.collect()
    await asyncio.sleep(0)
    assert logged == []
    threads.close()


@pytest.mark.parametrize(
    ("limit", "status"), [("MAX_WAITING_KEY_BYTES", 429), ("MAX_WAITING_BYTES", 503)], ids=["of one key", "of all"]
)
async def test_waiting_texts_have_a_common_limit(limit: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, limit, 100)
    jobs, threads = Jobs(), TokenizerThreads(2)
    first = asyncio.create_task(threads.run("a", 60, jobs.of("a")))
    await until_async(lambda: jobs.running == ["a"], 10, "the first works")
    with pytest.raises(ApiError) as refused:
        await threads.run("a", 60, jobs.of("a"))
    assert (refused.value.status, refused.value.retry_after_s) == (status, 1)
    jobs.free.set()
    await first
    assert await threads.run("a", 1000, jobs.of("alone")) == "alone"
    threads.close()
