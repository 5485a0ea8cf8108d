"""Requests that arrive and leave while others decode, through a real batcher over any engine."""

from __future__ import annotations

import json
import random
import shutil
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from placements.engines.nxd_inference.capabilities import NXD_WINDOW, nxd_release
from placements.facts.versions import reaches
from placements.resources.environ import compiling
from tests.checkpoints import VOCAB_SIZE, set_eos
from tests.closed.lane_record import count_compared
from tests.placements.fleets import model
from tests.replica_configs import replica_config as configured
from tests.workers.tables import Answers
from workers.batching.batcher import Batcher
from workers.engines.cpu.engine import CpuEngine
from workers.engines.nxd_inference import artifacts
from workers.engines.nxd_inference.config import NxdSettings
from workers.engines.nxd_inference.engine import NxdEngine
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import ReplicaConfig
from workers.messages.requests import GenerateRequest
from workers.text.tokenizer import ByteTokenizer

MAX_LEN = 96
TIE = 1e-4  # of the largest logit: float32 sums of a tiny model differ by less
PREFILL, DECODE = [16, 32, 64], [32, 64, MAX_LEN]
FULL = "qwen3-full"  # qwen3 without its window
Checkpoints = Callable[[str], Path]
Expected = Callable[[str], dict[str, list[int]]]
Arrival = tuple[str, list[int], int, bool]  # id, prompt, tokens wanted, whether it leaves before its end


@pytest.fixture(scope="session")
def sources(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """The shared checkpoints, and qwen3 without a window."""
    folders: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family != FULL:
            return checkpoint(family)
        if FULL not in folders:
            folders[FULL] = Path(shutil.copytree(checkpoint("qwen3"), tmp_path_factory.mktemp("nxd") / FULL))
            edit(folders[FULL], use_sliding_window=False, sliding_window=None, layer_types=["full_attention"] * 2)
        return folders[FULL]

    return get


def edit(folder: Path, **settings: object) -> None:
    """Changes settings of a checkpoint's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.fixture(scope="session")
def expected(sources: Checkpoints) -> Expected:
    """What the CPU engine answers to the usual traffic."""
    answers: dict[str, dict[str, list[int]]] = {}

    def get(family: str) -> dict[str, list[int]]:
        if family not in answers:
            answers[family] = served(cpu(sources(family)), arrivals())
        return answers[family]

    return get


def drawn_mixtral(sources: Checkpoints, folder: Path) -> Path:
    """A mixtral in ``folder`` for traces: each release of transformers draws other weights for the experts."""
    source = Path(shutil.copytree(sources("mixtral"), folder / "mixtral"))
    weights, generator = load_file(source / "model.safetensors"), torch.Generator().manual_seed(1)
    drawn = {name: 0.2 * torch.randn(weights[name].shape, generator=generator) for name in sorted(weights)}
    kept = {name: weight for name, weight in weights.items() if weight.dim() == 1}
    save_file(drawn | kept, source / "model.safetensors", {"format": "pt"})
    return source


def families(version: str) -> list[str]:
    """The test families that a version computes."""
    names = ["llama", "mixtral", "mistral"]
    if nxd_release(version) >= (0, 5):
        names += ["qwen2", FULL]
    return names + (["mistral-window"] if reaches(version, NXD_WINDOW) else [])


def refused(work: Callable[[], object]) -> EngineLoadError:
    with pytest.raises(EngineLoadError) as caught:
        work()
    return caught.value


def allow_fp8(monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]) -> None:
    """What fp8 needs besides is in the placement's environment."""
    named = {name: value for name, value in fields.items() if name.startswith("quantize")}
    for name, value in compiling(model("m", **named), "nxd-inference").items():
        monkeypatch.setenv(name, value)


def replica_config(source: Path, compiled: Path | None, **fields: Any) -> ReplicaConfig:
    """The configuration of an NxD Inference replica with 4 slots of ``MAX_LEN`` tokens in float32."""
    usual: dict[str, Any] = {
        "model": "m",
        "replica": 0,
        "epoch": 0,
        "host": "h",
        "engine": "nxd-inference",
        "source": str(source),
        "dtype": "fp32",
        "slots": 4,
        "max_len": MAX_LEN,
        "cores": [0, 1],
        "claims": None,
        "env": {},
        "log": "",
        "socket": "",
        "token": "",
        "tp_degree": 2,
        "prefill_buckets": PREFILL,
        "decode_buckets": DECODE,
        "compiled": None if compiled is None else str(compiled),
    }
    return configured(**(usual | fields))


def opened(source: Path, compiled: Path | None, kind: Any = NxdEngine, **fields: Any) -> Any:
    """A loaded adapter, or a mutant of it."""
    engine = kind(NxdSettings.of(replica_config(source, compiled, **fields)), compiled)
    engine.load()
    return engine


def cpu(source: Path, slots: int = 4) -> CpuEngine:
    engine = CpuEngine(source, slots=slots, max_len=MAX_LEN, threads=1)
    engine.load()
    return engine


def compile_here(settings: NxdSettings, entry: Any) -> None:
    """Instead of a process of its own, which takes seconds to start."""
    with artifacts.session(settings, entry).compiling():
        artifacts.compile_here(settings, entry.path)


def arrivals(count: int = 8, seed: int = 3) -> list[Arrival]:
    """Prompts of 1 to 50 tokens; every third request is followed by one that leaves in the middle."""
    rng = random.Random(seed)
    requests: list[Arrival] = []
    for number in range(count):
        length = rng.choice([1, 2, rng.randrange(3, 51)])
        prompt = [rng.randrange(6, VOCAB_SIZE) for _ in range(length)]
        requests.append((str(number), prompt, rng.randrange(4, 25), False))
        if number % 3 == 0:
            requests.append((f"leaves{number}", [7, 8, 9], 40, True))
    return requests


def served(engine: Any, requests: Sequence[Arrival], **how: Any) -> dict[str, list[int]]:
    """The tokens of every request that stays: three come at once, then one before each second step."""
    received = Answers()
    batcher = Batcher(engine, ByteTokenizer(), received)
    waiting = deque(requests)
    leaving: dict[str, int] = {}

    def submit() -> None:
        id, prompt, tokens, leaves = waiting.popleft()
        batcher.submit(GenerateRequest(id=id, prompt_ids=prompt, max_tokens=tokens, **({"temperature": 0.0} | how)))
        if leaves:
            leaving[id] = 3

    for _ in range(min(3, len(waiting))):
        submit()
    steps = 0
    while batcher.step() or waiting:
        steps += 1
        if waiting and steps % 2:
            submit()
        for id in list(leaving):
            if len(received.ids(id)) >= leaving[id]:
                batcher.cancel(id)
                del leaving[id]
    return {id: received.ids(id) for id, _, _, leaves in requests if not leaves}


def with_eos(source: Path, folder: Path, eos: list[int]) -> Path:
    """A copy that ends its answers with one of ``eos``."""
    copy = Path(shutil.copytree(source, folder))
    set_eos(copy, eos)
    return copy


def wrong(
    source: Path, requests: Sequence[Arrival], expected: dict[str, list[int]], answers: dict[str, list[int]]
) -> list[str]:
    """The requests whose tokens are not the expected ones.

    Two orders of summation differ in the last bits, so where two ids share the largest logit, either is right; and what
    follows the other one is not compared.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(source)).eval()
    bad = []
    for id, prompt, _, leaves in requests:
        if leaves:
            continue
        pairs = enumerate(zip(expected[id], answers[id], strict=False))
        same = next((place for place, (own, other) in pairs if own != other), None)
        count_compared(len(answers[id]) if same is None else same + 1)
        if expected[id] == answers[id]:
            continue
        if same is None:
            bad.append(id)
            continue
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *expected[id][:same]]])).logits[0, -1]
        if logits[expected[id][same]] - logits[answers[id][same]] > TIE * logits.abs().max():
            bad.append(id)
    return bad
