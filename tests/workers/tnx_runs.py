"""Requests through transformers-neuronx and through the CPU engine, which must answer alike."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from placements.engines.cpu.capabilities import FIRST_TRANSFORMERS
from placements.facts.versions import reaches
from tests.checkpoints import VOCAB_SIZE
from tests.closed.lane_record import count_compared
from tests.replica_configs import replica_config
from workers.batching.batcher import Batcher
from workers.engines.checkpoint_files import eos_token_ids, read_config
from workers.engines.cpu.engine import CpuEngine
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import ReplicaConfig
from workers.messages.requests import FinishReason, GenerateRequest, TokenEvent
from workers.text.tokenizer import load_tokenizer

MAX_LEN = 64
SLOTS = 3
BUCKETS = {"prefill_buckets": [8, 16, 64], "decode_buckets": [32, 64]}
STATIC = ("bloom", "gpt2", "gpt_neox", "opt")
CONTINUOUS = ("llama", "mistral", "mixtral")
SERIAL = ("gpt_neox",)  # one graph, no NEFF files, no sampling on the device


@dataclass(frozen=True)
class ScriptedRequest:
    """A request, and after how many of its tokens its client leaves."""

    prompt: tuple[int, ...]
    n: int
    leaves_after: int | None = None
    temperature: float = 0.0


def scripted_requests(seed: int, count: int, longest: int, most: int) -> list[ScriptedRequest]:
    """Ragged ones, at the edges of the buckets too; every fourth client leaves."""
    rng = random.Random(seed)
    lengths = [length for length in (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 40) if length <= longest]
    requests = []
    for number in range(count):
        length = rng.choice(lengths)
        prompt = tuple(rng.randrange(6, VOCAB_SIZE) for _ in range(length))
        n = rng.choice([1, 2, 3, min(most, 9), min(most, MAX_LEN - length)])
        requests.append(ScriptedRequest(prompt, n, 2 if number % 4 == 3 and n > 3 else None))
    return requests


def config(source: Path, **fields: Any) -> ReplicaConfig:
    """The configuration of the tiny model in float32 with a degree of 2."""
    usual: dict[str, Any] = {
        "model": "tiny",
        "replica": 0,
        "epoch": 0,
        "host": "h",
        "engine": "transformers-neuronx",
        "source": str(source),
        "dtype": "fp32",
        "slots": SLOTS,
        "max_len": MAX_LEN,
        "cores": [0, 1],
        "claims": None,
        "env": {},
        "log": "",
        "socket": "",
        "token": "",
        "tp_degree": 2,
    }
    return replica_config(**usual | fields)


def answers(
    engine: Any, source: Path, requests: Sequence[ScriptedRequest]
) -> list[tuple[list[int], FinishReason | None]]:
    """Ids and finish of each greedy request that stays. Two arrive at once, then one before every other step.

    ``engine`` is loaded. Raises what it raises.
    """
    events: defaultdict[int, list[TokenEvent]] = defaultdict(list)

    def receive(received: list[TokenEvent]) -> None:
        for event in received:
            events[int(event.id)].append(event)

    def ids(number: int) -> list[int]:
        return [token for event in events[number] for token in event.token_ids]

    batcher = Batcher(engine, load_tokenizer("cpu", str(source)), receive)

    def submit(number: int, new_request: ScriptedRequest) -> None:
        request = GenerateRequest(
            id=str(number),
            prompt_ids=list(new_request.prompt),
            max_tokens=new_request.n,
            temperature=new_request.temperature,
        )
        batcher.submit(request)

    arrivals = iter(enumerate(requests))
    cancelled: set[int] = set()
    for number, arrival_request in itertools.islice(arrivals, 2):
        submit(number, arrival_request)
    for step in itertools.count():
        progressed = batcher.step()
        arrival = next(arrivals, None) if step % 2 or not progressed else None
        if arrival is not None:
            submit(*arrival)
        elif not progressed:
            break
        for number in list(events):
            after = requests[number].leaves_after
            if number not in cancelled and after is not None and len(ids(number)) >= after:
                batcher.cancel(str(number))
                cancelled.add(number)
    return [
        (ids(number), events[number][-1].finish)
        for number, arrival_request in enumerate(requests)
        if arrival_request.leaves_after is None and not arrival_request.temperature
    ]


def scores(engine: Any, source: Path, prompts: Sequence[Sequence[int]]) -> list[list[float | None]]:
    """The logprobs of the prompts' tokens, beside a request without them. ``engine`` is loaded."""
    scored: defaultdict[int, list[float | None]] = defaultdict(list)

    def receive(events: list[TokenEvent]) -> None:
        for event in events:
            assert event.error is None, event.error
            scored[int(event.id)] += [item.logprob for item in event.prompt_logprobs]

    batcher = Batcher(engine, load_tokenizer("cpu", str(source)), receive)
    for number, prompt in enumerate((*prompts, prompts[0])):
        count = None if number == len(prompts) else 0
        batcher.submit(GenerateRequest(id=str(number), prompt_ids=list(prompt), max_tokens=2, prompt_logprobs=count))
    while batcher.step():
        pass
    assert scored.pop(len(prompts)) == []
    return [scored[number] for number in range(len(prompts))]


_wished: dict[tuple[str, tuple[ScriptedRequest, ...]], list[tuple[list[int], FinishReason | None]]] = {}


def of_the_cpu_engine(source: Path, requests: Sequence[ScriptedRequest]) -> list[tuple[list[int], FinishReason | None]]:
    """What the CPU engine answers to the same, or transformers' own loop where its release is too old for the engine.
    Remembered, since many tests ask the same."""
    key = (str(source), tuple(requests))
    if key not in _wished:
        engine = CpuEngine(source, slots=SLOTS, max_len=MAX_LEN, threads=1)
        if reaches(transformers.__version__, FIRST_TRANSFORMERS):
            engine.load()
            _wished[key] = answers(engine, source, requests)
        else:
            with pytest.raises(EngineLoadError, match=f"transformers {FIRST_TRANSFORMERS} or later"):
                engine.load()
            _wished[key] = _of_transformers(source, requests)
    count_compared(sum(len(ids) for ids, _ in _wished[key]))
    return _wished[key]


def _of_transformers(source: Path, requests: Sequence[ScriptedRequest]) -> list[tuple[list[int], FinishReason | None]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
    eos = eos_token_ids(source, read_config(source))
    texts: list[tuple[list[int], FinishReason | None]] = []
    for request in requests:
        if request.leaves_after is None and not request.temperature:
            ids = torch.tensor([request.prompt])
            mask = torch.ones_like(ids)
            output = model.generate(ids, attention_mask=mask, max_new_tokens=request.n, do_sample=False, pad_token_id=0)
            tokens = output[0, ids.shape[1] :].tolist()
            texts.append((tokens, FinishReason.STOP if tokens[-1] in eos else FinishReason.LENGTH))
    return texts


def requests_for(family: str, seed: int = 1, count: int = 14) -> list[ScriptedRequest]:
    """Those of the static families are shorter, so that several of them fit into one batch."""
    static = family in STATIC
    return scripted_requests(seed, count, longest=33 if static else MAX_LEN, most=40 if static else MAX_LEN)


def split(source: Path, target: Path) -> Path:
    """The checkpoint as ``save_pretrained_split`` would have written it, pickled."""
    shutil.copytree(source, target)
    weights = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    folder = target / "pytorch_model.bin"
    folder.mkdir()
    names = {}
    for index, (key, tensor) in enumerate(weights.items()):
        names[key] = f"p{index}.bin"
        torch.save(tensor, folder / names[key])
    (folder / "key_to_filename.json").write_text(json.dumps(names))
    return target
