"""The CPU engine of encoders with its batcher, against sentence-transformers and infinity, and against no batching.

    .venv/bin/python -m benchmarks.encoders [--only rate|latency] [--quick]
    COREWRIGHT_INFINITY_PYTHON=infinity/bin/python .venv/bin/python -m benchmarks.encoders

A BERT in the shape of all-MiniLM-L6-v2 with random weights, and texts of ragged lengths.

``rate``: from texts to vectors, with tokenization. Ours: requests of 16 texts, all at once. Rivals: one call of
sentence-transformers' `encode` with all texts, and of infinity's engine, in the interpreter that
COREWRIGHT_INFINITY_PYTHON names; without one it is skipped. All have batches of at most 32 texts. They alternate in
each round, and a ratio is the median of the rounds' ratios.

``latency``: requests of one text, Poisson arrivals at a share of what a server without batches can do, which is
measured first. That server is the same engine, one request after the other. Both get the same arrivals, in turns; the
latency of a request is from the time at which it was due. A request is refused if the replica's slots and the model's
queue in the gateway are full. With ``--quick`` there are fewer and shorter rounds.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import queue
import random
import statistics
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import Target, finish
from tests.encoders import WORDS, save_encoder, sentence_transformer
from workers.batching.encode_batcher import EncodeBatcher
from workers.engines.cpu.encoder import CpuEncoder
from workers.messages.encoder_protocol import EncodeInput
from workers.messages.requests import GenerateRequest, TokenEvent
from workers.text.input_tokens import InputTexts
from workers.text.tokenizer import HubTokenizer

TARGETS = {
    "rate_over_sentence_transformers": Target(1.0),
    "p99_at_70_over_unbatched": Target(1.0, at_least=False),
    "refused_at_120": Target(0.0, at_least=False),
}
MINI_LM: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
    "initializer_range": 0.02,
}
INFINITY = "COREWRIGHT_INFINITY_PYTHON"
ROWS, MAX_LEN = 32, 256
MAX_QUEUE = 256  # the default of a spec
TEXTS, PER_REQUEST = 512, 16
MEDIAN, SPREAD = 40, 0.8  # tokens of a text: log-normal, and the deviation of its logarithm
ROUND_S = 25.0  # of arrivals
MEASURED = 400  # requests that measure the capacity
ROUNDS = {"rate": 7, "latency": 3}
CLOSE = 1e-4


def ragged(count: int, seed: int) -> list[str]:
    """Returns texts; each word is one token."""
    draw = random.Random(seed)
    lengths = [min(MAX_LEN - 2, max(1, round(draw.lognormvariate(0.0, SPREAD) * MEDIAN))) for _ in range(count)]
    return [" ".join(f"w{draw.randrange(WORDS)}" for _ in range(length)) for length in lengths]


class Ours:
    """The engine, the tokenizer of the gateway, and a batcher over them."""

    def __init__(self, folder: Path, threads: int) -> None:
        self.engine = CpuEncoder(folder, kind="embedding", rows=ROWS, max_len=MAX_LEN, threads=threads)
        self.engine.load()
        self.tokenizer = HubTokenizer(str(folder))

    def tokens(self, texts: Sequence[str]) -> list[EncodeInput]:
        return self.tokenizer.encode_inputs(InputTexts(list(texts), MAX_LEN))

    def rate(self, texts: Sequence[str]) -> tuple[float, bytes]:
        """Returns the seconds for all texts, and the first vector."""
        answers: dict[str, bytes] = {}

        def keep(events: list[TokenEvent]) -> None:
            for event in events:
                assert event.part is not None
                answers[event.id] = answers.get(event.id, b"") + event.part.data

        began = time.perf_counter()
        batcher = EncodeBatcher(self.engine, keep)
        for start in range(0, len(texts), PER_REQUEST):
            batcher.submit(_request(str(start), self.tokens(texts[start : start + PER_REQUEST])))
        while batcher.step():
            pass
        seconds = time.perf_counter() - began
        width = 4 * self.engine.spec.width
        assert sum(map(len, answers.values())) == width * len(texts)
        return seconds, answers["0"][:width]


class Infinity:
    """infinity's engine in a process of its own."""

    def __init__(self, python: str, folder: Path, threads: int) -> None:
        command = [python, str(Path(__file__).parent / "encoders_parts" / "infinity_server.py")]
        self._process = subprocess.Popen(
            [*command, str(folder), str(ROWS), str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def rate(self, texts: Sequence[str]) -> tuple[float, float]:
        """Returns the seconds for all texts, and the first number of the first vector."""
        assert self._process.stdin is not None
        print(json.dumps(texts), file=self._process.stdin, flush=True)
        seconds, first = map(float, self._answer())
        return seconds, first

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _answer(self) -> list[str]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            name, *values = line.split()
            if name == "infinity":
                return values
        raise RuntimeError(f"infinity has ended with status {self._process.wait()}")


def rate(folder: Path, threads: int, rounds: int, texts: Sequence[str]) -> dict[str, float]:
    """Returns the ratios of ours to the rivals, in texts a second."""
    import numpy

    ours = Ours(folder, threads)
    rival = sentence_transformer(folder, "mean", width=MINI_LM["hidden_size"])
    expected = rival.encode(list(texts[:1]))[0]
    assert abs(numpy.frombuffer(ours.rate(texts[:PER_REQUEST])[1], numpy.float32) - expected).max() < CLOSE

    def sentence_transformers() -> float:
        began = time.perf_counter()
        rival.encode(list(texts), batch_size=ROWS, show_progress_bar=False)
        return time.perf_counter() - began

    ways: dict[str, Callable[[], float]] = {
        "ours": lambda: ours.rate(texts)[0],
        "sentence_transformers": sentence_transformers,
    }
    infinity = Infinity(python, folder, threads) if (python := os.environ.get(INFINITY)) else None
    if infinity is None:
        print(f"infinity: skipped; name an interpreter with infinity-emb 0.0.78 in {INFINITY}")
    else:
        assert abs(infinity.rate(texts[:1])[1] - _unit(expected)[0]) < CLOSE  # infinity scales vectors to length 1
        ways["infinity"] = lambda: infinity.rate(texts)[0]
    for way in ways.values():
        way()  # warm
    taken = [{name: way() for name, way in ways.items()} for _ in range(rounds)]
    if infinity is not None:
        infinity.close()
    measured: dict[str, float] = {}
    for name in ways:
        seconds = statistics.median(each[name] for each in taken)
        print(f"{name:22}  {len(texts) / seconds:7.1f} texts/s, median of {rounds}", flush=True)
        measured[f"{name}_texts_per_s"] = len(texts) / seconds
        if name != "ours":
            measured[f"rate_over_{name}"] = statistics.median(each[name] / each["ours"] for each in taken)
    return measured


@dataclass
class Load:
    """Requests that are due at certain seconds, and when each was answered."""

    inputs: Sequence[EncodeInput]
    due: Sequence[float]
    latencies: dict[int, float] = field(default_factory=dict)
    most: int = 0  # requests in the server at a time
    began: float = 0.0

    def send(self, submit: Callable[[int, EncodeInput], None]) -> None:
        """Submits each request when it is due."""
        self.began = time.perf_counter()
        for number, (input, due) in enumerate(zip(self.inputs, self.due, strict=True)):
            if (wait_s := self.began + due - time.perf_counter()) > 0:
                time.sleep(wait_s)
            self.most = max(self.most, number + 1 - len(self.latencies))
            submit(number, input)

    def answered(self, number: int) -> None:
        self.latencies[number] = time.perf_counter() - self.began - self.due[number]

    def quantile(self, share: float) -> float:
        """Returns a quantile of the latencies, in seconds."""
        assert len(self.latencies) == len(self.inputs)
        return sorted(self.latencies.values())[int(share * (len(self.latencies) - 1))]


def poisson(inputs: Sequence[EncodeInput], per_s: float, seed: int) -> Load:
    draw, at, due = random.Random(seed), 0.0, []
    for _ in inputs:
        at += draw.expovariate(per_s)
        due.append(at)
    return Load(inputs, due)


def batched(engine: CpuEncoder, load: Load) -> Load:
    """The requests through the batcher, in its own thread as in a replica."""

    def emit(events: list[TokenEvent]) -> None:
        for event in events:
            assert event.error is None
            load.answered(int(event.id))

    batcher = EncodeBatcher(engine, emit)
    thread = threading.Thread(target=batcher.run)
    thread.start()
    load.send(lambda number, input: batcher.submit(_request(str(number), [input])))
    assert batcher.drain(600.0)
    batcher.close()
    thread.join()
    return load


def unbatched(engine: CpuEncoder, load: Load) -> Load:
    """The requests one after the other, in the order of their arrival."""
    waiting: queue.SimpleQueue[tuple[int, EncodeInput] | None] = queue.SimpleQueue()

    def run() -> None:
        while (request := waiting.get()) is not None:
            engine.encode([request[1]])[0].tobytes()
            load.answered(request[0])

    thread = threading.Thread(target=run)
    thread.start()
    load.send(lambda number, input: waiting.put((number, input)))
    waiting.put(None)
    thread.join()
    return load


def latency(folder: Path, threads: int, rounds: int, seconds: float) -> dict[str, float]:
    """Returns the ratios of the 99th percentile at 70 % of the capacity, and those of ours at 120 %."""
    ours = Ours(folder, threads)
    inputs = ours.tokens(ragged(MEASURED, 1))
    at_once = Load(inputs, [0.0] * len(inputs))
    capacity = len(inputs) / max(unbatched(ours.engine, at_once).latencies.values())
    print(f"one at a time: {capacity:.1f} requests/s")
    inputs = ours.tokens(ragged(int(0.7 * capacity * seconds), 2))
    p99: dict[str, list[float]] = {"ours": [], "unbatched": []}
    for seed in range(rounds):
        for name, serve in (("ours", batched), ("unbatched", unbatched)):
            p99[name].append(serve(ours.engine, poisson(inputs, 0.7 * capacity, seed)).quantile(0.99))
        ms = {name: f"{values[-1] * 1e3:.1f} ms" for name, values in p99.items()}
        print(f"at 70 %: p99 {ms['ours']}, one at a time {ms['unbatched']}", flush=True)
    over = batched(ours.engine, poisson(inputs, 1.2 * capacity, rounds))
    refused = max(0, over.most - 2 * ROWS - MAX_QUEUE)
    print(f"at 120 %: p99 {over.quantile(0.99) * 1e3:.1f} ms, at most {over.most} requests at a time")
    return {
        "unbatched_requests_per_s": capacity,
        "p99_at_70_ms": statistics.median(p99["ours"]) * 1e3,
        "p99_at_70_over_unbatched": statistics.median(
            ours / other for ours, other in zip(p99["ours"], p99["unbatched"], strict=True)
        ),
        "p99_at_120_ms": over.quantile(0.99) * 1e3,
        "most_at_120": over.most,
        "refused_at_120": refused,
    }


def _request(id: str, inputs: list[EncodeInput]) -> GenerateRequest:
    return GenerateRequest(id=id, prompt_ids=[], max_tokens=1, inputs=inputs)


def _name_class_of_transformers_4(file: Path) -> None:
    """Lets infinity's transformers read the tokenizer, too: 5 writes the name of a class that 4 lacks."""
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}))


def _unit(vector: Any) -> Any:
    return vector / (vector**2).sum() ** 0.5


def main() -> None:
    import torch
    import transformers

    parser = argparse.ArgumentParser(prog="benchmarks.encoders")
    parser.add_argument("--only", choices=("rate", "latency"))
    parser.add_argument("--quick", action="store_true", help="Fewer rounds and requests, to see that it runs")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="Threads of torch")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    threads = arguments.threads
    torch.set_num_threads(threads)
    share = 4 if arguments.quick else 1
    measured: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_encoder(folder, "bert", **MINI_LM)
        _name_class_of_transformers_4(folder / "tokenizer_config.json")
        if arguments.only != "latency":
            rounds = 3 if arguments.quick else ROUNDS["rate"]
            measured |= rate(folder, threads, rounds, ragged(TEXTS // share, 0))
        if arguments.only != "rate":
            rounds = 1 if arguments.quick else ROUNDS["latency"]
            measured |= latency(folder, threads, rounds, ROUND_S / share)
    finish("encoders", measured, TARGETS)


if __name__ == "__main__":
    main()
