"""The way from zero to the first token, against a bare script: after a kill, from zero, and for a whole fleet.

    .venv/bin/python -m benchmarks.zero [--only killed|parked|up] [--gigabytes 2] [--rounds 3]

CPU engine, one fleet on an emulated host at a time. Each ratio is the median of the rounds' ratios, and the two sides
of a round are measured one right after the other. A *bare script* is a process that imports the CPU engine, loads the
demo's model and generates two tokens.

- *killed*: a replica of the demo's model is killed (-9), until it serves again, over the bare script. The phases of its
  start, as the replica reports them, are shown as shares of that time.
- *parked*: a model with ``min: 0`` and weights of 2 GB was unloaded after its idle time; from a request to the first
  token, over a process that has imported the engine, and then reads the same weights, which are in the page cache, and
  generates one token.
- *up*: ``corewright demo`` until it is ready, over a bare Ray head node and one bare script, one after the other; both
  with Ray's dashboard.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import Target, finish
from tests.fleet import LiveFleet, until
from tests.orchestrator.clients import Admin, complete

TINY = Path(__file__).parent.parent / "placements" / "examples" / "models" / "tiny"
DEADLINE_S = 180.0
IDLE_S = 2.0
KILLED = """\
version: 1
name: killed
hosts: {{emulate: inf2.48xlarge}}
models:
  tiny: {{source: {source}, engine: cpu, max_len: 512, replicas: {replicas}}}
"""
PARKED = """\
version: 1
name: parked
hosts: {{emulate: inf2.48xlarge}}
models:
  large: {{source: {source}, engine: cpu, max_len: 64, max_batch: 1, dtype: bf16, replicas: {{min: 0, max: 1}},
          scaling: {{idle_s: {idle_s}}}}}
"""
BARE = """\
import sys
import time
from pathlib import Path
from workers.batching.batcher import Batcher
from workers.engines.cpu.engine import CpuEngine
from workers.messages.requests import GenerateRequest
from workers.text.tokenizer import load_tokenizer
import torch, transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
import transformers.models.llama.modeling_llama
began = time.perf_counter()
engine = CpuEngine(Path(sys.argv[1]), slots=int(sys.argv[2]), max_len=int(sys.argv[3]), threads=1, dtype=sys.argv[4])
engine.load()
batcher = Batcher(engine, load_tokenizer("cpu", sys.argv[1]), lambda events: None)
tokens = int(sys.argv[5])
batcher.submit(GenerateRequest(id="first", prompt_ids=[1], max_tokens=tokens, temperature=0.0, ignore_eos=True))
while batcher.step():
    pass
print(time.perf_counter() - began)
"""
TARGETS = {
    "killed_over_bare_script": Target(0.35, at_least=False),
    "parked_over_read_and_prefill": Target(1.2, at_least=False),
    "up_over_ray_and_bare_script": Target(1.3, at_least=False),
}


def bare_script(
    source: Path, slots: int = 4, max_len: int = 512, dtype: str = "fp32", tokens: int = 2
) -> tuple[float, float]:
    """Returns the seconds of the whole process, and those after its imports."""
    command = [sys.executable, "-c", BARE, str(source), str(slots), str(max_len), dtype, str(tokens)]
    began = time.perf_counter()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began, float(done.stdout.split()[-1])


@contextlib.contextmanager
def running(spec: str) -> Iterator[LiveFleet]:
    with tempfile.TemporaryDirectory(prefix="cwz-", dir="/tmp") as folder:
        path = Path(folder) / "spec.yaml"
        path.write_text(spec)
        fleet = LiveFleet(path)
        try:
            yield fleet.wait_ready(DEADLINE_S)
        finally:
            fleet.clean()


def killed(rounds: int) -> dict[str, float]:
    """Another replica each round: one that dies again soon has to wait."""
    bare_script(TINY)  # reads the files into the page cache
    ratios, phases = [], list[dict[str, float]]()
    with running(KILLED.format(source=TINY, replicas=rounds)) as fleet:
        admin = Admin(fleet.home)
        for index in range(rounds):
            theirs, _ = bare_script(TINY)
            before = admin.replica(f"tiny/{index}")
            began = time.perf_counter()
            os.kill(before["pid"], signal.SIGKILL)

            def back(before: dict[str, Any] = before) -> dict[str, Any] | None:
                now = admin.replica(before["id"])
                return now if now and now["state"] == "ready" and now["epoch"] > before["epoch"] else None

            now = until(back, DEADLINE_S, "the replica is back")
            ours = time.perf_counter() - began
            assert complete(fleet, "tiny", "Once", max_tokens=1).status_code == 200
            ratios.append(ours / theirs)
            phases.append({phase: seconds / ours for phase, seconds in now["load_phases"].items()})
            print(
                f"killed: bare script {theirs:.2f} s, serving again after {ours:.2f} s: {now['load_phases']}",
                flush=True,
            )
    shares = {name: statistics.median(each.get(name, 0.0) for each in phases) for name in phases[0]}
    return {
        "killed_over_bare_script": statistics.median(ratios),
        **{f"killed_share_{name}": share for name, share in shares.items()},
    }


def parked(rounds: int, gigabytes: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="cwz-", dir="/tmp") as folder:
        source = Path(folder) / "large"
        write_model(source, gigabytes)
        bare_script(source, 1, 64, "bf16", 1)
        ratios = []
        with running(PARKED.format(source=source, idle_s=IDLE_S)) as fleet:
            assert complete(fleet, "large", "Once", max_tokens=1).status_code == 200
            for _ in range(rounds):
                until(lambda: fleet.status()["models"][0]["state"] == "unloaded", DEADLINE_S, "the model is unloaded")
                _, theirs = bare_script(source, 1, 64, "bf16", 1)
                ours = first_token_s(fleet.port, "large")
                ratios.append(ours / theirs)
                phases = fleet.status()["models"][0]["replicas"][0]["load_phases"]
                print(f"parked: read and prefill {theirs:.2f} s, first token after {ours:.2f} s: {phases}", flush=True)
    return {"parked_over_read_and_prefill": statistics.median(ratios)}


def first_token_s(port: int, model: str) -> float:
    """Returns the seconds until the first token of a streamed completion. The client has imported what it needs."""
    body = json.dumps({"model": model, "prompt": "Once", "max_tokens": 1, "stream": True})
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)) as connection:
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        events = connection.getresponse()
        while not events.readline().startswith(b"data: {"):
            pass
        return time.perf_counter() - began


def write_model(folder: Path, gigabytes: float) -> None:
    """Writes a llama with random weights of about this size in bfloat16, and the demo's tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    layer = 2 * (4 * 2048**2 + 3 * 2048 * 5632)  # bytes
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_attention_heads=16,
        num_key_value_heads=16,
        num_hidden_layers=max(1, round(gigabytes * 1e9 / layer)),
        vocab_size=512,
        max_position_embeddings=512,
        dtype="bfloat16",
    )
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(config).save_pretrained(folder)
    torch.set_default_dtype(torch.float32)
    for file in TINY.glob("tokenizer*"):
        shutil.copy(file, folder)


def up(rounds: int) -> dict[str, float]:
    ratios = []
    for _ in range(rounds):
        theirs = bare_ray_s() + bare_script(TINY)[0]
        began = time.perf_counter()
        fleet = LiveFleet(None, spare=True, arguments=("--dashboard",))
        try:
            fleet.wait_ready(DEADLINE_S)
            ours = time.perf_counter() - began
        finally:
            fleet.clean()
        ratios.append(ours / theirs)
        print(f"up: Ray's head and the bare script {theirs:.2f} s, the demo {ours:.2f} s", flush=True)
    return {"up_over_ray_and_bare_script": statistics.median(ratios)}


def bare_ray_s() -> float:
    """Seconds until a head node with its dashboard is connected to, in a process of its own."""
    code = "import ray, time; ray.init(log_to_driver=False); ray.shutdown()"
    with tempfile.TemporaryDirectory(prefix="cwz-", dir="/tmp") as folder:
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "RAY_TMPDIR": folder},
        )
        return time.perf_counter() - began


def main() -> None:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=("killed", "parked", "up"))
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    measured: dict[str, float] = {}
    if given.only in (None, "killed"):
        measured |= killed(given.rounds)
    if given.only in (None, "parked"):
        measured |= parked(given.rounds, given.gigabytes)
    if given.only in (None, "up"):
        measured |= up(given.rounds)
    finish("zero", measured, TARGETS)


if __name__ == "__main__":
    main()
