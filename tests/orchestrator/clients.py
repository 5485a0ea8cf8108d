"""Clients of a running fleet, and what its echo replicas must answer."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from orchestrator.process.home import Home
from tests.fleet import Fleet, LiveFleet, until
from workers.engines.echo.engine import echo_tokens

Question = tuple[dict[str, Any], str]  # the body of a completion, and the text that answers it
ANSWER_DEADLINE_S = (
    90.0  # for any request, whatever dies: a hang is seen after 15 s, and a request begun thrice at most
)
CONTROLLER_BACK_S = 45.0
CONNECT_S = 10.0
BROKEN = "broken"  # the kind of an answer whose connection ended
ERRORS = {  # the table of docs/cli.md, without those that need a wrong request
    404: ("invalid_request_error", {"model_not_found"}),
    408: ("invalid_request_error", {"request_timeout"}),  # a part of the request was lost with its link
    429: ("rate_limit_error", {"queue_full"}),
    500: ("internal_error", {"engine_failed", "internal_error"}),
    503: (
        "service_unavailable",
        {
            "model_loading",
            "model_unavailable",
            "replica_lost",
            "server_unavailable",
            "tokenizer_busy",
            "tokenizer_unavailable",
        },
    ),
}


def echo_text(prompt: str, count: int) -> str:
    return bytes(echo_tokens(list(prompt.encode()), count)).decode()


class Streamed:
    """A streamed completion that is read in the background."""

    def __init__(self, fleet: Fleet, model: str, prompt: str, max_tokens: int, url: str | None = None) -> None:
        """``url``: of a gateway, if the fleet has several."""
        self.text = ""
        self.longest_gap_s = 0.0  # between two of its tokens
        self.status = 0  # of the answer; above 200 it is an error as a whole, and no stream
        self.error: dict[str, Any] | None = None
        self.broken: httpx.TransportError | None = None  # the connection ended without the end of the answer
        self.done = threading.Event()
        self.begun = threading.Event()
        self._body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "stream": True}
        self._thread = threading.Thread(target=self._read, args=(url or fleet.url,), daemon=True)
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
            last = None
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    self.error = event.get("error", self.error)
                    self.text += "".join(choice["text"] for choice in event.get("choices", ()))
                    self.begun.set()
                    now = time.monotonic()
                    self.longest_gap_s = max(self.longest_gap_s, now - (last or now))
                    last = now


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

    back_s = CONTROLLER_BACK_S

    def __init__(self, home: Path) -> None:
        self._home = Home(home)

    def send(self, method: str, route: str, **options: Any) -> httpx.Response:
        """Send a request once. Raises httpx.ConnectError if there is no record of a fleet, either."""
        record = self._home.read_record()
        if record is None:
            raise httpx.ConnectError("no fleet.json")
        headers = {"Authorization": f"Bearer {record.token}", "x-corewright-by": "test"}
        return httpx.request(method, f"{record.admin_url}/admin/v1{route}", headers=headers, timeout=30, **options)

    def get(self, route: str, **query: Any) -> Any:
        def answered() -> httpx.Response | None:
            try:
                return self.send("GET", route, params=query)
            except httpx.TransportError:
                return None

        response: httpx.Response = until(answered, self.back_s, f"GET {route} is answered")
        assert response.status_code == 200, f"GET {route}: {response.status_code} {response.text}"
        return response.json()

    def post(self, route: str, **fields: Any) -> tuple[int, Any]:
        """The status and the answer; (0, why) when the controller died meanwhile, and nobody knows what it did."""

        def answered() -> tuple[int, Any] | None:
            try:
                response = self.send("POST", route, json=fields)
            except httpx.ConnectError:
                return None  # nobody has heard it: it may be sent again
            except httpx.TransportError as error:
                return 0, repr(error)
            return response.status_code, response.json()

        answer: tuple[int, Any] = until(answered, self.back_s, f"POST {route} is answered")
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


@dataclass(frozen=True)
class Failure:
    """A request without its exact answer."""

    kind: str  # the code of an error in the documented form, BROKEN, "malformed" or "wrong"
    model: str
    gateway: str  # its URL
    replica: str | None  # its id, if the answer had begun
    began: float  # as of time.monotonic
    ended: float
    problem: str | None  # what is wrong with the answer; None for an error in the documented form

    @property
    def is_false(self) -> bool:
        """True if the client got a wrong answer, rather than none or an error."""
        return self.problem is not None and self.kind != BROKEN


class Load:
    """Clients that ask one question after the other for as long as the block lasts. Every answer is judged: it is
    exact, or an error in the documented form; anything else stands in ``wrong``."""

    def __init__(
        self,
        fleet: Fleet,
        question: Callable[[int, int], Question],
        clients: int = 8,
        permits: Callable[[Failure], bool] = lambda failure: failure.problem is None,
        timeout_s: float = ANSWER_DEADLINE_S,
    ) -> None:
        """``permits``: whether something explains that failure. False answers are never permitted. ``timeout_s``: for
        the next byte."""
        self.kinds: Counter[str] = Counter()  # "exact", and those of failures
        self.wrong: list[str] = []
        self.slowest_s = 0.0
        self._fleet = fleet
        self._question = question
        self._permits = permits
        self._timeout_s = timeout_s
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
        with httpx.Client(timeout=httpx.Timeout(self._timeout_s, connect=CONNECT_S)) as http:
            number = 0
            while not self._over.is_set():
                body, expected = self._question(client, number)
                failure, took = _exchange(http, self._fleet.entrance(), body, expected)
                permitted = failure is None or (not failure.is_false and self._permits(failure))
                with self._lock:
                    self.kinds[failure.kind if failure else "exact"] += 1
                    self.slowest_s = max(self.slowest_s, took)
                    if not permitted or took > ANSWER_DEADLINE_S:
                        self.wrong.append(f"{time.strftime('%H:%M:%S')} after {took:.1f} s, {body}: {failure}")
                number += 1
                if failure is not None:
                    self._over.wait(0.1)  # as a client does that was told to come again


def _exchange(http: httpx.Client, url: str, body: dict[str, Any], expected: str) -> tuple[Failure | None, float]:
    """Send one request. Returns its failure, and the seconds that it took."""
    answer = _Answer(http, f"{url}/v1/completions", body)
    began = time.monotonic()
    try:
        kind, problem = answer.read_stream(expected) if body.get("stream") else answer.read(expected)
    except httpx.HTTPError as error:
        kind, problem = BROKEN, f"{error!r} after {answer.text!r}"
    except (ValueError, KeyError, IndexError) as error:
        kind, problem = "malformed", f"{error!r}"
    ended = time.monotonic()
    if kind == BROKEN and not expected.startswith(answer.text):
        kind = "wrong"
    if kind == "exact":
        return None, ended - began
    return Failure(kind, body["model"], url, answer.replica, began, ended, problem), ended - began


class _Answer:
    """The answer to one request, as far as it has arrived. Both ways to read it return its kind, and what is wrong."""

    def __init__(self, http: httpx.Client, url: str, body: dict[str, Any]) -> None:
        self.text = ""
        self.replica: str | None = None
        self._http = http
        self._url = url
        self._body = body

    def read(self, expected: str) -> tuple[str, str | None]:
        response = self._http.post(self._url, json=self._body)
        if response.status_code != 200:
            return self._error(response)
        self.replica = response.headers.get("x-corewright-replica")
        self.text = response.json()["choices"][0]["text"]
        return self._judged(expected)

    def read_stream(self, expected: str) -> tuple[str, str | None]:
        error, done = None, False
        with self._http.stream("POST", self._url, json=self._body) as response:
            self.replica = response.headers.get("x-corewright-replica")
            if response.status_code != 200:
                response.read()
                return self._error(response)
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    error = event if "error" in event else error
                    self.text += "".join(choice["text"] for choice in event.get("choices", ()))
        if error is None and not done:
            return BROKEN, f"the stream ended without [DONE] after {self.text!r}"
        if error is None:
            return self._judged(expected)
        problem = error_problem(200, error, streamed=True)
        if problem is None and done:
            problem = "a stream that failed ended with [DONE]"
        if problem is None and not expected.startswith(self.text):
            problem = f"{self.text!r} before the error is not the beginning of {expected!r}"
        return ("malformed" if problem else str(error["error"]["code"])), problem

    def _judged(self, expected: str) -> tuple[str, str | None]:
        return ("exact", None) if self.text == expected else ("wrong", f"{self.text!r} instead of {expected!r}")

    def _error(self, response: httpx.Response) -> tuple[str, str | None]:
        answer = response.json()
        problem = error_problem(response.status_code, answer, response.headers.get("retry-after"))
        return ("malformed" if problem else str(answer["error"]["code"])), problem
