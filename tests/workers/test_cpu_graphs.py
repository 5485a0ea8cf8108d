"""The cpu engine's compiled graphs answer as the engine that compiles nothing."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

from tests.checkpoints import FAMILIES, VOCAB_SIZE, make_checkpoint
from tests.workers.tnx_runs import answers, asked, config, of_the_cpu_engine
from workers.compiling.build import Built, Order, Reply, Working, predict
from workers.engines.cpu import graphs as cpu_graphs
from workers.engines.cpu.artifacts import is_whole
from workers.engines.cpu.engine import CpuEngine
from workers.messages.replica_config import ReplicaConfig
from workers.neff_cache import shared_artifacts
from workers.neff_cache.compiled_artifacts import MANIFEST, entry, peek

Checkpoints = Callable[[str], Path]
PROJECT = Path(__file__).parents[2]
DEADLINE_S = 300.0
FEW = {"prefill_buckets": [16], "decode_buckets": [32]}  # each bucket is a graph to be compiled

# Takes code from a folder, says so, and stays at it.
KILLED = """
import sys, tempfile
from pathlib import Path
from workers.engines.cpu import graphs as cpu_graphs
tempfile.tempdir = sys.argv[2]
with cpu_graphs.using_code_from(Path(sys.argv[1])):
    print("holds", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs are traced and not compiled: what is computed is the same, and it takes no minute."""
    monkeypatch.setattr(cpu_graphs, "BACKEND", "eager")
    torch._dynamo.reset()


def opened(source: Path, **fields: Any) -> CpuEngine:
    usual: dict[str, Any] = {"slots": 3, "max_len": 32, "threads": 1, **FEW}
    engine = CpuEngine(source, **usual | fields)
    engine.load()
    return engine


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed * 100 + length)
    return [rng.randrange(6, VOCAB_SIZE) for _ in range(length)]


def greedy(engine: CpuEngine, slots: Sequence[int], prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """``count`` tokens for each of the prompts, which begin together."""
    tokens = engine.prefill(slots, prompts).argmax(-1).tolist()
    found = [[token] for token in tokens]
    positions = [len(one) for one in prompts]
    for _ in range(count - 1):
        tokens = engine.decode(slots, tokens, positions).argmax(-1).tolist()
        positions = [position + 1 for position in positions]
        for row, token in zip(found, tokens, strict=True):
            row.append(token)
    return found


@pytest.mark.compile
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("traced")
def test_every_familys_greedy_answers_are_those_without_graphs(checkpoint: Checkpoints, family: str) -> None:
    """Prompts below a bucket and at its edge, in slots with a gap between them, until the slots are full."""
    prompts = [prompt(5), prompt(16)]
    engine = opened(checkpoint(family), compile=True)
    assert greedy(engine, [0, 2], prompts, 16) == greedy(opened(checkpoint(family)), [0, 2], prompts, 16)


@pytest.mark.compile
@pytest.mark.usefixtures("traced")
def test_a_step_leaves_the_slots_that_are_not_in_it(checkpoint: Checkpoints) -> None:
    """Their graph takes all slots, and writes where nobody reads."""
    engine, plain = opened(checkpoint("llama"), compile=True), opened(checkpoint("llama"))
    prompts = [prompt(4), prompt(9), prompt(16)]
    for one in (engine, plain):
        one.prefill([0, 1, 2], prompts)
        one.decode([0, 2], [7, 8], [4, 16])
    logits = [one.decode([1], [9], [9]) for one in (engine, plain)]
    assert torch.allclose(logits[0], logits[1], atol=1e-4)


@pytest.mark.compile
@pytest.mark.usefixtures("traced")
def test_passes_without_a_bucket_stay_as_they_were(checkpoint: Checkpoints) -> None:
    """Prompts that go on from a prefix, prompts in chunks, and checks of a draft, in the same KV cache as graphs."""
    engine = opened(checkpoint("llama"), compile=True, prefix_cache=True)
    plain = opened(checkpoint("llama"), prefix_cache=True)
    whole, rest = prompt(16), prompt(5, seed=1)
    found = []
    for one in (engine, plain):
        one.prefill([0], [whole])
        one.copy_prefix(0, 2, 12)
        after = one.prefill_from([2], [[*whole[:12], *rest]], [12])
        checked = one.verify([2], [[7, 8, 9]], [17])
        found.append(torch.cat([after, checked[0], one.decode([0, 2], [5, 6], [16, 20])]))
    assert torch.allclose(found[0], found[1], atol=1e-4)


@pytest.mark.compile
@pytest.mark.usefixtures("traced")
def test_requests_that_come_and_go_are_answered_alike(checkpoint: Checkpoints) -> None:
    """Through the batcher, with several buckets."""
    requests = asked(seed=5, count=8, longest=40, most=12)
    engine = CpuEngine(
        checkpoint("llama"),
        slots=3,
        max_len=64,
        threads=1,
        prefill_buckets=[8, 64],
        decode_buckets=[16, 64],
        compile=True,
    )
    engine.load()
    assert answers(engine, checkpoint("llama"), requests) == of_the_cpu_engine(checkpoint("llama"), requests)


# With the real compiler: one model of one layer, compiled once for all of these tests


@dataclass(frozen=True)
class Made:
    """A model that was compiled, after a compile of it was killed."""

    config: ReplicaConfig
    key: str
    told: list[Reply]
    left: list[str]  # what counted as whole after the kill
    alive: list[psutil.Process]  # of its compilers, after it


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("compiled")
    source = make_checkpoint(folder / "model", "llama", layers=1, eos=None)
    one = config(
        source,
        engine="cpu",
        slots=2,
        max_len=16,
        engine_options={"compile": True},
        prefill_buckets=[16],
        decode_buckets=[16],
        compiled=str(folder / "kept"),
        # The second: torch need not try out what the CPU has, which is three compiles more.
        env={"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1", "TMPDIR": str(folder / "tmp")},
    )
    (folder / "tmp").mkdir()
    (wanted,) = predict(one).wanted
    process = _start(one)
    compilers = _at_work(process, Path(wanted.folder))
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(compilers, timeout=DEADLINE_S)
    left = [told.folder for told in predict(one).wanted if told.complete]
    left += [str(path) for path in Path(wanted.folder).glob(MANIFEST)]
    process = _start(one)
    assert process.stdout is not None
    told = [msgspec.json.decode(line, type=Reply) for line in process.stdout]
    process.wait()
    return Made(one, wanted.key, told, left, alive)


def _start(one: ReplicaConfig) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "workers.compiling.build", "compile"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **one.env, "PYTHONPATH": str(PROJECT)},
    )
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(msgspec.json.encode(Order(config=one, parent=os.getpid())))
    return process


def _at_work(process: subprocess.Popen[bytes], folder: Path) -> list[psutil.Process]:
    """The compilers below a process, once the first of them writes into the entry."""
    pause, root = threading.Event(), psutil.Process(process.pid)
    for _ in range(int(DEADLINE_S / 0.02)):
        found = [child for child in root.children(recursive=True) if "cc1plus" in child.name()]
        if found and any(folder.rglob("*.cpp")):
            return root.children(recursive=True)
        assert process.poll() is None
        pause.wait(0.02)
    raise AssertionError("no compiler was started")


@pytest.mark.compile
@pytest.mark.timeout(900)
def test_a_compile_that_was_killed_counts_for_nothing(made: Made) -> None:
    """And its compilers are gone."""
    assert (made.left, made.alive) == ([], [])


@pytest.mark.compile
@pytest.mark.timeout(900)
def test_the_next_compile_tells_every_graph_and_makes_the_entry(made: Made) -> None:
    """Two graphs: of a prompt, and of a step."""
    built = made.told[-1]
    assert isinstance(built, Built)
    assert (built.compiled, [one.complete for one in built.wanted]) == ([made.key], [True])
    graphs = [(told.done, told.total) for told in made.told if isinstance(told, Working) and told.total]
    assert graphs == [(0, 2), (1, 2)]


START = """
import json, sys
import msgspec
from torch._dynamo.utils import counters
from workers.messages.replica_config import ReplicaConfig
from workers.engines.open_engine import open_engine
engine = open_engine(msgspec.json.decode(sys.stdin.buffer.read(), type=ReplicaConfig))
engine.load()
tokens = engine.prefill([0, 1], json.loads(sys.argv[1])).argmax(-1).tolist()
found, positions = [[token] for token in tokens], [len(prompt) for prompt in json.loads(sys.argv[1])]
for _ in range(8):
    tokens = engine.decode([0, 1], tokens, positions).argmax(-1).tolist()
    positions = [position + 1 for position in positions]
    for row, token in zip(found, tokens):
        row.append(token)
counted = counters["inductor"]
print(json.dumps([counted["fxgraph_cache_hit"], counted["fxgraph_cache_miss"], found]))
"""


@pytest.mark.compile
@pytest.mark.timeout(900)
def test_a_start_finds_every_graph_and_answers_as_without_them(made: Made, tmp_path: Path) -> None:
    """By torch's own count; from a copy that came by way of a ``neff_cache`` just as well. What was made stays as it
    was."""
    root, shared = tmp_path / "other", str(tmp_path / "shared")
    held = peek(Path(made.config.compiled or ""), predict(made.config).wanted[0].manifest, is_whole)
    assert shared_artifacts.push(held, shared) > 0
    with entry(root, held.manifest, is_whole) as other:
        assert shared_artifacts.pull(other, shared)
    prompts = [prompt(3), prompt(7)]
    started = subprocess.run(
        [sys.executable, "-c", START, json.dumps(prompts)],
        input=msgspec.json.encode(msgspec.structs.replace(made.config, compiled=str(root))),
        stdout=subprocess.PIPE,
        env={**os.environ, **made.config.env, "PYTHONPATH": str(PROJECT)},
        check=True,
    )
    hits, missed, found = json.loads(started.stdout.splitlines()[-1])
    plain = opened(Path(made.config.source or ""), slots=2, max_len=16, prefill_buckets=[16], decode_buckets=[16])
    assert (hits, missed) == (2, 0)
    assert found == greedy(plain, [0, 1], prompts, 9)
    assert peek(root, held.manifest, is_whole).complete
    headers = [file for folder in (root, Path(made.config.env["TMPDIR"])) for file in folder.rglob("*.gch")]
    assert headers == []  # they are large, of one compile, and of no use to a start


def test_headers_lie_where_the_compile_wants_them_and_only_as_long(tmp_path: Path) -> None:
    """A start that takes what is there compiles none; afterwards torch is as it was."""
    from torch._inductor import codecache

    usual: Any = codecache
    before = usual._HEADER_DIR, usual._HEADER_LOCK_DIR, usual._precompile_header
    (tmp_path / "code").mkdir()
    with cpu_graphs.storing_code_in(tmp_path / "code"):
        (headers,) = (path for path in tmp_path.iterdir() if path.name != "code")
        assert str(headers) == usual._HEADER_DIR
        assert Path(usual._HEADER_LOCK_DIR).parent == headers
    with cpu_graphs.using_code_from(tmp_path / "code"):
        assert usual._precompile_header("a.h", "g++") is None
    assert (usual._HEADER_DIR, usual._HEADER_LOCK_DIR, usual._precompile_header) == before
    assert [path.name for path in tmp_path.iterdir()] == ["code"]


def test_the_copy_of_a_start_that_was_killed_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is in use stays, and so does what is none."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.so").write_bytes(b"program")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "code"), str(tmp_path / "tmp")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(PROJECT)},
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "holds\n"
    (held,) = (tmp_path / "tmp").iterdir()
    (tmp_path / "tmp" / "corewright-else").mkdir()
    for path in (tmp_path / "tmp").iterdir():
        os.utime(path, (1e9, 1e9))
    with cpu_graphs.using_code_from(tmp_path / "code"):
        assert (held / "a.so").exists()
    process.kill()
    process.communicate(timeout=60)
    with cpu_graphs.using_code_from(tmp_path / "code"):
        assert not held.exists()
    assert [path.name for path in (tmp_path / "tmp").iterdir()] == ["corewright-else"]


def test_the_settings_are_inductors_own() -> None:
    """A name that it does not have would be refused at the first compile, minutes into a start."""
    from torch._inductor import config as inductor

    known = inductor.get_config_copy()
    assert [name for name in cpu_graphs.SETTINGS if name not in known] == []
    assert list(itertools.chain(cpu_graphs.SETTINGS.values())) == [True, True]
