"""A fleet on Neuron engines: stand-ins of AWS's packages and of the machine below them, everything else as it is.

Four models on three engines, in interpreters of the engines' own, on a host that is no emulated one.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.doubles.machine import Machine, build_machine, make_interpreter
from tests.fleet import LiveFleet, until
from workers.engines.cpu.engine import CpuEngine
from workers.host.facts.neuron_ls import parse_neuron_ls

pytestmark = pytest.mark.live

MODELS = {
    "llama": "transformers-neuronx",
    "gpt2": "transformers-neuronx",
    "qwen2": "nxd-inference",
    "mixtral": "optimum-neuron",
}
SPEC = """\
version: 1
name: on-neuron
hosts: {{instance: inf2.48xlarge}}
engines:
  transformers-neuronx: {{python: {python}}}
  nxd-inference: {{python: {python}}}
  optimum-neuron: {{python: {optimum}}}
defaults: {{dtype: fp32, max_len: 128, max_batch: 3, tp_degree: 2, threads: 1}}
models:
  llama: {{source: ./llama, engine: transformers-neuronx}}
  gpt2: {{source: ./gpt2, engine: transformers-neuronx}}
  qwen2: {{source: ./qwen2}}
  mixtral: {{source: ./mixtral, engine: optimum-neuron}}
"""
PINNED = "4.57.6"  # transformers, by the metadata of Optimum Neuron's interpreter only
NEW_TOKENS = 12
READY_S = 180.0
BACK_S = 60.0
HOLD = "from neuron_double.runtime import runtime; runtime().claim(); print('held', flush=True); input()"

Prompts = list[list[int]]


@dataclass
class Fleet:
    """The live fleet, its machine, and what the CPU engine answers to each model's prompts."""

    live: LiveFleet
    machine: Machine
    prompts: Prompts
    expected: dict[str, list[list[int]]]

    def ask(self, model: str, prompt: list[int]) -> httpx.Response:
        body = {"model": model, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        return httpx.post(f"{self.live.url}/v1/completions", json=body, timeout=BACK_S)

    def answers(self, model: str) -> list[Any]:
        """To all prompts, sent at once: more than the model has slots."""
        with ThreadPoolExecutor(len(self.prompts)) as pool:
            return [_tokens(answer) for answer in pool.map(lambda prompt: self.ask(model, prompt), self.prompts)]

    def entry(self, id: str) -> Any:
        return self.live.replica(id)

    def only(self, model: str) -> Any:
        """The entry of the model's only replica, once it is ready."""

        def ready() -> Any:
            entries = next(entry for entry in self.live.status()["models"] if entry["name"] == model)["replicas"]
            return entries[0] if [entry["state"] for entry in entries] == ["ready"] else None

        return until(ready, BACK_S, f"{model} has one replica, and it is ready")

    def holders(self) -> dict[int, int]:
        """The pid on each device, by neuron-ls."""
        tool = self.machine.root / "opt/aws/neuron/bin/neuron-ls"
        completed = subprocess.run([str(tool), "-j"], capture_output=True, check=True, timeout=30)
        return {process.device: process.pid for process in parse_neuron_ls(completed.stdout).processes}

    def host(self) -> Any:
        return self.live.status()["hosts"][0]


def _tokens(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


def cpu_answers(path: Path, prompts: Prompts) -> list[list[int]]:
    """Greedy, one prompt after the other."""
    engine = CpuEngine(path, slots=1, max_len=128, dtype="fp32")
    engine.load()
    answers = []
    for prompt in prompts:
        tokens = [int(engine.prefill([0], [prompt])[0].argmax())]
        while len(tokens) < NEW_TOKENS:
            tokens.append(int(engine.decode([0], tokens[-1:], [len(prompt) + len(tokens) - 1])[0].argmax()))
        answers.append(tokens)
    engine.close()
    return answers


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("neuron")
    machine = build_machine(folder / "machine", "inf2.48xlarge")
    rng = random.Random(6)
    prompts = [[rng.randrange(6, VOCAB_SIZE) for _ in range(rng.randrange(2, 50))] for _ in range(10)]
    expected = {name: cpu_answers(make_checkpoint(folder / name, name), prompts) for name in MODELS}
    spec = folder / "spec.yaml"
    optimum = make_interpreter(folder / "optimum")
    metadata = next((folder / "optimum").glob("lib/*/site-packages")) / f"transformers-{PINNED}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: transformers\nVersion: {PINNED}\n")
    spec.write_text(SPEC.format(python=machine.python, optimum=optimum))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**machine.env, "NEURON_COMPILE_CACHE_URL": str(folder / "cache")}.items():
            patch.setenv(name, value)
        with LiveFleet(spec) as live:
            live.wait_ready(READY_S)
            yield Fleet(live, machine, prompts, expected)


@pytest.mark.parametrize("model", MODELS)
def test_each_model_answers_as_the_cpu_engine_does(fleet: Fleet, model: str) -> None:
    """Token for token, with more requests at once than it has slots, through the gateway."""
    assert fleet.answers(model) == fleet.expected[model]


def test_status_names_the_engine_and_its_process_holds_the_cores(fleet: Fleet) -> None:
    """`auto` is resolved to the installed engine; the process runs the engine's interpreter, on its own device."""
    holders = fleet.holders()
    for model, engine in MODELS.items():
        replica = fleet.only(model)
        first, last = map(int, replica["cores"].split("-"))
        assert (replica["engine"], last - first) == (engine, 1)
        assert holders[first // 2] == replica["pid"]
        assert psutil.Process(replica["pid"]).environ()["NEURON_RT_VISIBLE_CORES"] == replica["cores"]
    host = fleet.host()
    assert (host["emulated"], host["leased"], host["free"], host["quarantined"]) == (False, 8, 16, 0)


def test_optimum_exports_in_its_own_interpreter(fleet: Fleet) -> None:
    """Its artifacts record the transformers of that one, which Ray's does not have."""
    manifests = [json.loads(path.read_text()) for path in (fleet.live.home / "compiled").glob("*/corewright.json")]
    versions = {manifest["engine"]: manifest["versions"].get("transformers") for manifest in manifests}
    assert versions["optimum-neuron"] == PINNED != versions["nxd-inference"]


def test_a_killed_replica_restarts_on_the_same_cores(fleet: Fleet) -> None:
    """The runtime frees them with the process; stale reports of the tools about the old process are ignored."""
    before = fleet.only("llama")
    os.kill(before["pid"], signal.SIGKILL)
    after = until(
        lambda: (now := fleet.entry("llama/0"))["state"] == "ready" and now["pid"] != before["pid"] and now,
        BACK_S,
        "the replica is back",
    )
    assert (after["cores"], after["restarts"]) == (before["cores"], 1)
    assert fleet.answers("llama") == fleet.expected["llama"]
    assert fleet.host()["quarantined"] == 0


def test_a_foreign_process_on_a_core_is_detected_and_avoided(fleet: Fleet) -> None:
    """By neuron-ls: its cores are quarantined with its pid, and released when it ends."""
    env = {**os.environ, **fleet.machine.env, "NEURON_RT_VISIBLE_CORES": "20-21"}
    with subprocess.Popen(
        [str(fleet.machine.python), "-c", HOLD], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as stranger:
        try:
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == "held\n"
            until(lambda: fleet.host()["quarantined"] == 2, BACK_S, "the stranger is seen")
            quarantine = [(core["core"], core["pid"]) for core in fleet.host()["quarantine"]]
            assert quarantine == [(20, stranger.pid), (21, stranger.pid)]
        finally:
            stranger.kill()
    until(lambda: fleet.host()["quarantined"] == 0, BACK_S, "the cores are free again")


def test_a_rolling_update_answers_every_request(fleet: Fleet) -> None:
    """The new replica starts on other cores while the old one serves."""
    before = fleet.only("qwen2")
    fleet.live.spec.write_text(fleet.live.spec.read_text().replace("./qwen2}", "./qwen2, max_batch: 2}"))
    applied = fleet.live.corewright("apply", str(fleet.live.spec))
    assert applied.returncode == 0, applied.stderr

    requests = 0
    while (status := fleet.live.corewright("rollout", "status")).stdout.find("complete:") < 0:
        assert _tokens(fleet.ask("qwen2", fleet.prompts[requests % 10])) == fleet.expected["qwen2"][requests % 10]
        requests += 1
        assert requests < 500, status.stdout

    after = fleet.only("qwen2")
    assert after["version"] != before["version"]
    assert requests > 0
    assert fleet.answers("qwen2") == fleet.expected["qwen2"]


def test_faulty_memory_quarantines_the_device_and_moves_the_replica(fleet: Fleet) -> None:
    """A step fails with 1201: its model starts elsewhere, the others continue, status shows the reason and the
    remedy.
    """
    before, others = fleet.only("gpt2"), [fleet.only(model)["pid"] for model in ("llama", "qwen2")]
    first, last = map(int, before["cores"].split("-"))
    fleet.machine.plan({"at": "execute", "status": 1201, "core": first, "times": 1})

    refused = fleet.ask("gpt2", fleet.prompts[0])
    assert (refused.status_code, refused.json()["error"]["code"]) == (500, "engine_failed")
    after = until(
        lambda: (now := fleet.only("gpt2"))["pid"] != before["pid"] and now, BACK_S, "the model is served elsewhere"
    )

    assert after["cores"] != before["cores"]
    assert fleet.answers("gpt2") == fleet.expected["gpt2"]
    assert [fleet.only(model)["pid"] for model in ("llama", "qwen2")] == others
    withheld = fleet.host()["quarantine"]
    assert [core["core"] for core in withheld] == [first, last]
    assert all(core["cause"].startswith("memory-uncorrectable: ") for core in withheld)
    assert f"core {first} gets no replica: memory-uncorrectable" in fleet.live.corewright("status").stdout

    assert fleet.live.corewright("uncordon", f"inf2.48xlarge/0:{before['cores']}").returncode == 0
    assert fleet.host()["quarantined"] == 0


def test_a_fleet_that_ends_frees_every_core(fleet: Fleet) -> None:
    """No process holds a device any more."""
    assert fleet.live.stop() == 0
    assert fleet.holders() == {}
