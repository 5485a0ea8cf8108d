"""Measures how much a hostile client with a valid key disturbs the streams of other clients.

    .venv/bin/python -m benchmarks.hostile
    .venv/bin/python -m benchmarks.hostile --only prompts

One gateway process, configured as in a fleet, serves two models with one replica each: *calm*, an echo engine that
returns a token every 20 ms, and *attacked*, a small model on the cpu engine. For each model, a separate process reads a
stream and records the longest time between two events. Before each attack the streams are read undisturbed for the same
time. The result is the growth of the longest gap of the calm model's stream (``NAME_gap_growth_ms``), and the number of
interrupted streams of both models (``NAME_cut``). The gap of the attacked model's own stream is only reported: its
replica also works for the attacker.

- ``prompts``: 4 clients send, in turn, prompts of 1 and 7.9 MB to ``/v1/completions``, ``/v1/chat/completions``,
  ``/tokenize`` and ``/detokenize``: words, one word without spaces, spaces, special tokens, letters with several
  accents each, token ids, lists of empty prompts, and JSON of the same size that consists of brackets or of objects, in
  an ignored field and in one that is given twice.
- ``logprobs``: answers with ``n: 16, max_tokens: 2800, logprobs: 20``, not streamed, one after the other; each answer
  must be complete.
- ``schemas``: 4 clients request answers in JSON, 8 choices each, with a schema of 8,000 properties, with new schemas of
  the largest allowed size, and with a schema that refers to itself endlessly.
- ``scrapes``: 32 clients scrape ``/metrics``.

All processes share the same cores. The attackers have a lower priority than the gateway, as if they ran on other
machines.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.gateway_parts.child import Child
from benchmarks.report import Target, finish

PARTS = "benchmarks."
SECONDS = 30.0
ATTACKERS_NICE = 10
STEP_MS = 20.0
MAX_LEN = 4096
ATTACKED_SLOTS = 24
CHOICES, TOKENS, TOP = 16, 2800, 20
MB = 2**20
GROWTH_MS = 250.0
ANSWER_S = 240.0
ATTACKS = ("prompts", "logprobs", "schemas", "scrapes")
TARGETS = {
    **{f"{name}_gap_growth_ms": Target(GROWTH_MS, at_least=False) for name in ATTACKS},
    **{f"{name}_cut": Target(0, at_least=False) for name in ATTACKS},
    **{f"{name}_answers": Target(1) for name in ATTACKS},
}
Body = tuple[str, bytes]  # the path and the request body; GET where that is empty


class Attack:
    """Clients that send bodies in turn until they are stopped. ``answers`` counts the responses by path and status."""

    def __init__(self, port: int, key: str, clients: int, bodies: Iterator[Body]) -> None:
        self._port = port
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        self._bodies = bodies
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.answers: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Returns when the last responses have arrived."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                path, body = next(self._bodies)
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_S)
            try:
                connection.request("POST" if body else "GET", path, body or None, self._headers)
                answer = connection.getresponse()
                data = answer.read()
                outcome = str(answer.status)
                if b'"n":16' in body:
                    self._check_complete(answer.status, data)
            except OSError as error:  # such as a connection that closes before the request is sent
                outcome = type(error).__name__
            finally:
                connection.close()
            with self._lock:
                self.answers[f"{path} {outcome}"] += 1

    def _check_complete(self, status: int, data: bytes) -> None:
        choices = json.loads(data)["choices"] if status == 200 else []
        lengths = [len(choice["logprobs"]["tokens"]) for choice in choices]
        if lengths != [TOKENS] * CHOICES:
            self.wrong.append(f"{status} {data[:200]!r} with {lengths} tokens")


def _packed(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def long_prompts() -> Iterator[Body]:
    bodies: list[Body] = []
    for size in (MB, int(7.9 * MB)):
        texts = {
            "words": "The quick brown fox jumps over the lazy dog. " * (size // 45),
            "one word": "a" * size,
            "spaces": " " * size,
            "special tokens": "<|bos|>" * (size // 7),
            "accents": "a\u0301\u0316" * (size // 14),  # JSON of ASCII alone
        }
        for text in texts.values():
            bodies.append(("/v1/completions", _packed({"model": "attacked", "prompt": text})))
            chat = {"model": "attacked", "messages": [{"role": "user", "content": text}]}
            bodies.append(("/v1/chat/completions", _packed(chat)))
            bodies.append(("/tokenize", _packed({"model": "attacked", "prompt": text})))
        ids = [5] * (size // 2 - 50)
        bodies.append(("/v1/completions", _packed({"model": "attacked", "prompt": ids})))
        bodies.append(("/detokenize", _packed({"model": "attacked", "tokens": ids})))
        start = b'{"model":"attacked","prompt":"x","metadata":'
        bodies.append(("/v1/completions", start + b"[" * size + b"}"))
        objects = b"[" + b"{}," * (size // 3 - 50) + b"{}]"
        bodies.append(("/v1/completions", start + objects + b"}"))
        bodies.append(("/v1/completions", b'{"model":"attacked","prompt":' + objects + b',"prompt":"x"}'))
        bodies.append(("/v1/completions", b'{"model":"attacked","prompt":[' + b"[]," * (size // 3 - 50) + b'""]}'))
    return itertools.cycle(bodies)


def large_answers() -> Iterator[Body]:
    fields = {"model": "attacked", "prompt": "x", "max_tokens": TOKENS, "n": CHOICES, "logprobs": TOP}
    return itertools.repeat(("/v1/completions", _packed({**fields, "ignore_eos": True})))


def large_schemas() -> Iterator[Body]:
    def body(schema: Any) -> Body:
        response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        fields = {"model": "attacked", "prompt": "x", "max_tokens": 16, "n": 8, "response_format": response_format}
        return "/v1/completions", _packed(fields)

    for number in itertools.count():
        for count in (8000, 1000):
            properties = {f"p{number}_{i}": {"type": "string"} for i in range(count)}
            yield body({"type": "object", "properties": properties, "required": list(properties)})
        yield body({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})


def scrapes() -> Iterator[Body]:
    return itertools.repeat(("/metrics", b""))


CLIENTS: dict[str, tuple[int, Callable[[], Iterator[Body]]]] = {
    "prompts": (4, long_prompts),
    "logprobs": (1, large_answers),
    "schemas": (4, large_schemas),
    "scrapes": (32, scrapes),
}


class Streams:
    """One stream of each model, each read by a separate process."""

    def __init__(self, watches: dict[str, Child]) -> None:
        self._watches = watches

    @contextlib.contextmanager
    def watched(self) -> Iterator[dict[str, dict[str, Any]]]:
        """Reads the streams while the body runs. The result is filled at its end, by model."""
        results: dict[str, dict[str, Any]] = {}
        for watch in self._watches.values():
            watch.ask({})
        yield results
        for model, watch in self._watches.items():
            results[model] = watch.ask({})


def run(attacks: list[str]) -> dict[str, float]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cwh-", dir="/tmp")))

        def start(part: str, argument: Any) -> Child:
            return stack.enter_context(Child(PARTS + part, argument, log=folder / "log"))

        source = str(folder / "model")
        calm = {"socket": str(folder / "calm"), "slots": 4, "max_len": MB, "step_ms": STEP_MS}
        start("gateway_parts.engine", calm)
        attacked = {"socket": str(folder / "attacked"), "source": source, "slots": ATTACKED_SLOTS, "max_len": MAX_LEN}
        start("hostile_parts.replica", attacked)
        models = [
            {"name": "calm", "socket": calm["socket"], "max_len": MB},
            {**attacked, "name": "attacked", "engine": "cpu"},
        ]
        gateway = start("gateway_parts.ours", {"home": str(folder / "home"), "models": models, "beats": True})
        port, key = gateway.ready["port"], gateway.ready["key"]
        streams = Streams(
            {
                model: start("hostile_parts.watch", {"port": port, "key": key, "model": model, "tokens": tokens})
                for model, tokens in (("calm", MB // 2), ("attacked", MAX_LEN - 100))
            }
        )
        warm = Attack(port, key, 1, itertools.repeat(("/tokenize", _packed({"model": "attacked", "prompt": "x"}))))
        warm.stop()  # the tokenizer is loaded
        measured: dict[str, float] = {}
        os.nice(ATTACKERS_NICE)
        for name in attacks:
            gateway.ask({})
            measured |= attacked_by(name, streams, port, key)
            turns = gateway.ask({})
            for figure, ms in turns.items():
                measured[f"{name}_{figure}"] = ms
            print(
                f"{name:<9} the gateway's longest turn {turns['longest_turn_ms']:.0f} ms, the one with the most CPU "
                f"time {turns['busy_ms']:.0f} ms",
                flush=True,
            )
        return measured


def attacked_by(name: str, streams: Streams, port: int, key: str) -> dict[str, float]:
    clients, bodies = CLIENTS[name]
    with streams.watched() as before:
        time.sleep(SECONDS)
    with streams.watched() as during:
        attack = Attack(port, key, clients, bodies())
        time.sleep(SECONDS)
        attack.stop()
    counts = ", ".join(f"{count} x {outcome}" for outcome, count in sorted(attack.answers.items()))
    for model in before:
        cut = during[model]["cut"] or before[model]["cut"]
        print(
            f"{name:<9} {model:<9} largest gap {before[model]['gap_ms']:.0f} ms undisturbed, "
            f"{during[model]['gap_ms']:.0f} ms attacked, of {during[model]['events']} events"
            + (f"; CUT: {cut}" if cut else ""),
            flush=True,
        )
    print(f"{name:<9} answers: {counts}", flush=True)
    for wrong in attack.wrong[:1]:
        raise RuntimeError(f"{name}: an answer was wrong: {wrong}")
    return {
        f"{name}_gap_growth_ms": during["calm"]["gap_ms"] - before["calm"]["gap_ms"],
        f"{name}_cut": sum(bool(stream["cut"]) for streams in (before, during) for stream in streams.values()),
        f"{name}_answers": attack.answers.total(),
        f"{name}_gap_undisturbed_ms": before["calm"]["gap_ms"],
        f"{name}_gap_of_attacked_model_ms": during["attacked"]["gap_ms"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=ATTACKS, action="append")
    finish("hostile", run(parser.parse_args().only or list(ATTACKS)), TARGETS)


if __name__ == "__main__":
    main()
