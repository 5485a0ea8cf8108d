"""Clients of a running fleet, and what its echo replicas must answer."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from orchestrator.process.home import Home
from tests.fleet import LiveFleet, until
from workers.engines.echo import echo_tokens

Question = tuple[dict[str, Any], str]  # the body of a completion, and the text that answers it
ANSWER_DEADLINE_S = (
    90.0  # for any request, whatever dies: a hang is seen after 15 s, and a request begun thrice at most
)
CONTROLLER_BACK_S = 45.0
ERRORS = {  # the table of docs/cli.md, without those that need a wrong request
    404: ("invalid_request_error", {"model_not_found"}),
    429: ("rate_limit_error", {"queue_full"}),
    500: ("internal_error", {"engine_failed", "internal_error"}),
    503: (
        "service_unavailable",
        {"model_loading", "model_unavailable", "replica_lost", "server_unavailable", "tokenizer_unavailable"},
    ),
}


def echo_text(prompt: str, count: int) -> str:
    return bytes(echo_tokens(list(prompt.encode()), count)).decode()


class Streamed:
    """A streamed completion that is read in the background."""

    def __init__(self, fleet: LiveFleet, model: str, prompt: str, max_tokens: int) -> None:
        self.text = ""
        self.status = 0  # of the answer; above 200 it is an error as a whole, and no stream
        self.error: dict[str, Any] | None = None
        self.broken: httpx.TransportError | None = None  # the connection ended without the end of the answer
        self.done = threading.Event()
        self.begun = threading.Event()
        self._body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "stream": True}
        self._thread = threading.Thread(target=self._read, args=(fleet.url,), daemon=True)
        self._thread.start()

    def _read(self, url: str) -> None:
        try:
            self._read_events(url)
        except httpx.TransportError as error:
            self.broken = error
        finally:
            self.done.set()

    def _read_events(self, url: str) -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json=self._body, timeout=60) as response:
            self.status = response.status_code
            if self.status != 200:
                self.error = json.loads(response.read())["error"]
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    self.error = event.get("error", self.error)
                    self.text += "".join(choice["text"] for choice in event.get("choices", ()))
                    self.begun.set()


class Sent:
    """A plain completion that has been sent, and whose answer is read later."""

    def __init__(self, fleet: LiveFleet, body: dict[str, Any]) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", fleet.port, timeout=60)
        self._connection.request("POST", "/v1/completions", json.dumps(body))

    def answer(self) -> Any:
        return json.loads(self._connection.getresponse().read())

    def close(self) -> None:
        """Leave before the answer."""
        self._connection.close()


def complete(fleet: LiveFleet, model: str, prompt: str = "hello", **fields: Any) -> httpx.Response:
    return fleet.http.post("/v1/completions", json={"model": model, "prompt": prompt, **fields})


class Admin:
    """The admin API of a fleet, through restarts of its controller."""

    def __init__(self, fleet: LiveFleet) -> None:
        record = Home(fleet.home).read_record()
        assert record is not None
        headers = {"Authorization": f"Bearer {record.token}", "x-corewright-by": "test"}
        self._http = httpx.Client(base_url=f"{record.admin_url}/admin/v1", headers=headers, timeout=30)

    def get(self, route: str, **query: Any) -> Any:
        def answered() -> httpx.Response | None:
            try:
                return self._http.get(route, params=query)
            except httpx.TransportError:
                return None

        response: httpx.Response = until(answered, CONTROLLER_BACK_S, f"GET {route} is answered")
        assert response.status_code == 200, f"GET {route}: {response.status_code} {response.text}"
        return response.json()

    def post(self, route: str, **fields: Any) -> tuple[int, Any]:
        """The status and the answer; (0, why) when the controller died meanwhile, and nobody knows what it did."""

        def answered() -> tuple[int, Any] | None:
            try:
                response = self._http.post(route, json=fields)
            except httpx.ConnectError:
                return None  # nobody has heard it: it may be sent again
            except httpx.TransportError as error:
                return 0, repr(error)
            return response.status_code, response.json()

        answer: tuple[int, Any] = until(answered, CONTROLLER_BACK_S, f"POST {route} is answered")
        return answer

    def status(self) -> Any:
        return self.get("/status")

    def replica(self, id: str) -> Any:
        """Its entry in the status; None when it is not there."""
        return next((r for model in self.status()["models"] for r in model["replicas"] if r["id"] == id), None)

    def apply(self, text: str, base_dir: str = "/", **fields: Any) -> tuple[int, Any]:
        return self.post("/apply", text=text, file="test.yaml", base_dir=base_dir, **fields)


def echo_questions(models: Sequence[str], seed: int, longest: int = 40) -> Callable[[int, int], Question]:
    """Plain and streamed completions of echo models in turn, with prompts that nobody else sends."""
    drawn = [random.Random(f"{seed} {client}") for client in range(256)]

    def question(client: int, number: int) -> Question:
        rng = drawn[client]
        prompt, count = f"client {client} asks {number}", rng.randint(1, longest)
        body = {"model": rng.choice(models), "prompt": prompt, "max_tokens": count, "stream": number % 2 == 0}
        return body, echo_text(prompt, count)

    return question


def error_problem(status: int, body: Any, retry_after: str | None = None, streamed: bool = False) -> str | None:
    """What is wrong with an error's form as docs/cli.md has it; None when nothing is. ``streamed``: in an event."""
    try:
        error = body["error"]
        keys, type, code = set(error), error["type"], error["code"]
    except (KeyError, TypeError):
        return f"{status} is no error object: {body}"
    if keys != {"message", "type", "param", "code"} or not error["message"]:
        return f"{status} has other keys than documented: {body}"
    known = list(ERRORS.values()) if streamed else [ERRORS[status]] if status in ERRORS else []
    if not any(type == known_type and code in codes for known_type, codes in known):
        return f"{status} has a type or code that does not belong to it: {body}"
    if not streamed and status in (429, 503) and not (retry_after or "").isdigit():
        return f"{status} has no Retry-After: {body}"
    return None


class Load:
    """Clients that ask one question after the other for as long as the block lasts. Every answer is judged: it is
    exact, or an error in the documented form; anything else stands in ``wrong``."""

    def __init__(self, fleet: LiveFleet, question: Callable[[int, int], Question], clients: int = 8) -> None:
        self.kinds: Counter[str] = Counter()  # "exact", and the codes of errors
        self.wrong: list[str] = []
        self.slowest_s = 0.0
        self._url = fleet.url
        self._question = question
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._work, args=(i,), daemon=True) for i in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        deadline = time.monotonic() + ANSWER_DEADLINE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        hanging = sum(thread.is_alive() for thread in self._threads)
        if hanging:
            self.wrong.append(f"{hanging} requests had no answer {ANSWER_DEADLINE_S:.0f} s after the last event")

    @property
    def answered(self) -> int:
        """Requests with an answer, errors among them."""
        return sum(self.kinds.values())

    @property
    def failed(self) -> dict[str, int]:
        """The errors, counted."""
        return {kind: count for kind, count in self.kinds.items() if kind != "exact"}

    def wait_answered(self, more: int, deadline_s: float = ANSWER_DEADLINE_S, kind: str | None = None) -> None:
        """Wait until so many more were answered (of one kind, or of any)."""

        def count() -> int:
            return self.answered if kind is None else self.kinds[kind]

        enough = count() + more
        until(lambda: self.wrong or count() >= enough, deadline_s, f"{more} more answers, after {dict(self.kinds)}")

    def _work(self, client: int) -> None:
        with httpx.Client(base_url=self._url, timeout=ANSWER_DEADLINE_S) as http:
            number = 0
            while not self._over.is_set():
                body, expected = self._question(client, number)
                began = time.monotonic()
                try:
                    kind, problem = (
                        _ask_streamed(http, body, expected) if body.get("stream") else _ask(http, body, expected)
                    )
                except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
                    kind, problem = "none", f"{error!r}"
                took = time.monotonic() - began
                if problem is None and took > ANSWER_DEADLINE_S:
                    problem = f"{kind}, but only after {took:.0f} s"
                with self._lock:
                    self.kinds[kind] += 1
                    self.slowest_s = max(self.slowest_s, took)
                    if problem is not None:
                        self.wrong.append(f"{time.strftime('%H:%M:%S')} after {took:.1f} s, {body}: {problem}")
                number += 1
                if kind != "exact":
                    self._over.wait(0.1)  # as a client does that was told to come again


def _ask(http: httpx.Client, body: dict[str, Any], expected: str) -> tuple[str, str | None]:
    response = http.post("/v1/completions", json=body)
    answer = response.json()
    if response.status_code == 200:
        text = answer["choices"][0]["text"]
        return "exact", None if text == expected else f"{text!r} instead of {expected!r}"
    problem = error_problem(response.status_code, answer, response.headers.get("retry-after"))
    return ("malformed" if problem else str(answer["error"]["code"])), problem


def _ask_streamed(http: httpx.Client, body: dict[str, Any], expected: str) -> tuple[str, str | None]:
    text, error, done = "", None, False
    with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            answer = json.loads(response.read())
            problem = error_problem(response.status_code, answer, response.headers.get("retry-after"))
            return ("malformed" if problem else str(answer["error"]["code"])), problem
        for line in response.iter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                error = event if "error" in event else error
                text += "".join(choice["text"] for choice in event.get("choices", ()))
    if error is not None:
        problem = error_problem(200, error, streamed=True)
        if problem is None and done:
            problem = "a stream that failed ended with [DONE]"
        if problem is None and not expected.startswith(text):
            problem = f"{text!r} before the error is no beginning of {expected!r}"
        return ("malformed" if problem else str(error["error"]["code"])), problem
    if not done:
        return "cut", f"the stream ended without [DONE] after {text!r}"
    return "exact", None if text == expected else f"{text!r} instead of {expected!r}"
