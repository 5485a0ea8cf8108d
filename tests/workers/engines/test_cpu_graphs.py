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
from tests.replica_configs import changed
from tests.workers.tnx_runs import answers, config, of_the_cpu_engine, scripted_requests
from workers.compiled import shared_sets
from workers.compiled.host_sets import MANIFEST, entry, peek
from workers.compiled.orders import Built, Order, Reply, Working
from workers.engines.cpu import graphs as cpu_graphs
from workers.engines.cpu.artifacts import is_whole
from workers.engines.cpu.engine import CpuEngine
from workers.messages.json_form import encoded
from workers.messages.replica_config import ReplicaConfig
from workers.serving.prepare import predict

Checkpoints = Callable[[str], Path]
PROJECT = Path(__file__).parents[3]
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
    """The graphs are traced and not compiled: the same computation, without a minute of compiling."""
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
    answers = [[token] for token in tokens]
    positions = [len(prompt) for prompt in prompts]
    for _ in range(count - 1):
        tokens = engine.decode(slots, tokens, positions).argmax(-1).tolist()
        positions = [position + 1 for position in positions]
        for row, token in zip(answers, tokens, strict=True):
            row.append(token)
    return answers


@pytest.mark.compile
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("traced")
def test_greedy_answers_equal_those_without_graphs(checkpoint: Checkpoints, family: str) -> None:
    """Prompts below a bucket and at its edge, in slots with a gap between them, until the slots are full."""
    prompts = [prompt(5), prompt(16)]
    engine = opened(checkpoint(family), compile=True)
    assert greedy(engine, [0, 2], prompts, 16) == greedy(opened(checkpoint(family)), [0, 2], prompts, 16)


@pytest.mark.compile
@pytest.mark.usefixtures("traced")
def test_a_step_keeps_the_slots_that_it_does_not_list(checkpoint: Checkpoints) -> None:
    """The graph takes all slots, and idle ones write to a position that is never read."""
    engine, plain = opened(checkpoint("llama"), compile=True), opened(checkpoint("llama"))
    prompts = [prompt(4), prompt(9), prompt(16)]
    for runner in (engine, plain):
        runner.prefill([0, 1, 2], prompts)
        runner.decode([0, 2], [7, 8], [4, 16])
    logits = [runner.decode([1], [9], [9]) for runner in (engine, plain)]
    assert torch.allclose(logits[0], logits[1], atol=1e-4)


@pytest.mark.compile
@pytest.mark.usefixtures("traced")
def test_passes_without_a_graph_run_uncompiled(checkpoint: Checkpoints) -> None:
    """Prompts that go on from a prefix, prompts in chunks, and checks of a draft, in the same KV cache as graphs."""
    engine = opened(checkpoint("llama"), compile=True, prefix_cache=True)
    plain = opened(checkpoint("llama"), prefix_cache=True)
    beginning, ending = prompt(16), prompt(5, seed=1)
    outputs = []
    for runner in (engine, plain):
        runner.prefill([0], [beginning])
        runner.copy_prefix(0, 2, 12)
        after = runner.prefill_from([2], [[*beginning[:12], *ending]], [12])
        checked = runner.verify([2], [[7, 8, 9]], [17])
        outputs.append(torch.cat([after, checked[0], runner.decode([0, 2], [5, 6], [16, 20])]))
    assert torch.allclose(outputs[0], outputs[1], atol=1e-4)


@pytest.mark.compile
@pytest.mark.usefixtures("traced")
def test_graphs_change_no_answer_of_concurrent_requests(checkpoint: Checkpoints) -> None:
    """Through the batcher, with several buckets."""
    requests = scripted_requests(seed=5, count=8, longest=40, most=12)
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
    replies: list[Reply]
    left: list[str]  # what counted as whole after the kill
    alive: list[psutil.Process]  # of its compilers, after it


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("compiled")
    source = make_checkpoint(folder / "model", "llama", layers=1, eos=None)
    replica = config(
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
    (verdict,) = predict(replica).wanted
    process = _start(replica)
    compilers = _at_work(process, Path(verdict.folder))
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(compilers, timeout=DEADLINE_S)
    remains = [replies.folder for replies in predict(replica).wanted if replies.complete]
    remains += [str(path) for path in Path(verdict.folder).glob(MANIFEST)]
    process = _start(replica)
    assert process.stdout is not None
    replies = [msgspec.json.decode(line, type=Reply) for line in process.stdout]
    process.wait()
    return Made(replica, verdict.key, replies, remains, alive)


def _start(replica: ReplicaConfig) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "workers.serving.prepare", "compile"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **replica.place.env, "PYTHONPATH": str(PROJECT)},
    )
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(encoded(Order(config=replica, parent=os.getpid())))
    return process


def _at_work(process: subprocess.Popen[bytes], folder: Path) -> list[psutil.Process]:
    """The compilers below a process, once the first of them writes into the entry."""
    pause, root = threading.Event(), psutil.Process(process.pid)
    for _ in range(int(DEADLINE_S / 0.02)):
        compilers = [child for child in root.children(recursive=True) if "cc1plus" in child.name()]
        if compilers and any(folder.rglob("*.cpp")):
            return root.children(recursive=True)
        assert process.poll() is None
        pause.wait(0.02)
    raise AssertionError("no compiler was started")


@pytest.mark.compile
@pytest.mark.timeout(900)
def test_a_killed_compile_leaves_no_complete_entry(made: Made) -> None:
    """And its compilers are gone."""
    assert (made.left, made.alive) == ([], [])


@pytest.mark.compile
@pytest.mark.timeout(900)
def test_the_next_compile_reports_every_graph_and_completes_the_entry(made: Made) -> None:
    """Two graphs: of a prompt, and of a step."""
    built = made.replies[-1]
    assert isinstance(built, Built)
    assert (built.compiled, [verdict.complete for verdict in built.wanted]) == ([made.key], [True])
    graphs = [(reply.done, reply.total) for reply in made.replies if isinstance(reply, Working) and reply.total]
    assert graphs == [(0, 2), (1, 2)]


START = """
import json, sys
import msgspec
from torch._dynamo.utils import counters
from workers.messages.json_form import decoded
from workers.messages.replica_config import ReplicaConfig
from workers.engines.open_engine import open_engine
engine = open_engine(decoded(sys.stdin.buffer.read(), ReplicaConfig))
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
def test_a_start_compiles_nothing_and_answers_as_without_graphs(made: Made, tmp_path: Path) -> None:
    """By torch's own count; from a copy that came by way of a ``neff_cache`` just as well. What was made stays as it
    was."""
    root, shared = tmp_path / "other", str(tmp_path / "shared")
    held = peek(Path(made.config.run.compiled or ""), predict(made.config).wanted[0].manifest, is_whole)
    assert shared_sets.push(held, shared) > 0
    with entry(root, held.manifest, is_whole) as other:
        assert shared_sets.pull(other, shared)
    prompts = [prompt(3), prompt(7)]
    started = subprocess.run(
        [sys.executable, "-c", START, json.dumps(prompts)],
        input=encoded(changed(made.config, compiled=str(root))),
        stdout=subprocess.PIPE,
        env={**os.environ, **made.config.place.env, "PYTHONPATH": str(PROJECT)},
        check=True,
    )
    hits, missed, answers = json.loads(started.stdout.splitlines()[-1])
    plain = opened(Path(made.config.source or ""), slots=2, max_len=16, prefill_buckets=[16], decode_buckets=[16])
    assert (hits, missed) == (2, 0)
    assert answers == greedy(plain, [0, 1], prompts, 9)
    assert peek(root, held.manifest, is_whole).complete
    headers = [file for folder in (root, Path(made.config.place.env["TMPDIR"])) for file in folder.rglob("*.gch")]
    assert headers == []  # they are large, of one compile, and of no use to a start


def test_headers_are_compiled_into_a_temporary_folder(tmp_path: Path) -> None:
    """A start with existing code compiles none; afterwards torch's settings are restored."""
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


def test_the_next_start_removes_the_copy_of_a_killed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy in use stays, and so do other folders."""
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


def test_inductor_has_all_settings() -> None:
    """A name that it does not have would be refused at the first compile, minutes into a start."""
    from torch._inductor import config as inductor

    config = inductor.get_config_copy()
    assert [name for name in cpu_graphs.SETTINGS if name not in config] == []
    assert list(itertools.chain(cpu_graphs.SETTINGS.values())) == [True, True]
