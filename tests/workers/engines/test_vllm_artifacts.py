"""A vLLM server on Neuron compiles once, into a folder that only the same settings find again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.fleet import until
from tests.replica_configs import changed, replica_config
from tests.s3 import S3Server
from workers.compiled import preparation
from workers.compiled.host_sets import entry
from workers.compiled.orders import NEEDS_DEVICE, Built, Order, Predicted, Reply, Wanted
from workers.engines.vllm.artifacts import NO_COMPILE, filling
from workers.engines.vllm.engine import start_vllm
from workers.host import file_lock
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.json_form import encoded
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Trouble
from workers.serving import prepare

DEADLINE_S = 30.0
NXD, NEURON = "0.4.1", "0.24.0.1.1.0"  # of the plugin
# `vllm serve` as far as its compiled artifacts go: its start is in the log LOG, each compilation waits for the file
# GATE, and GRAPHS are the names of the graphs that the later plugin needs.
SERVER = """
import http.server, json, os, pathlib, signal, socketserver, sys, time
uds = sys.argv[sys.argv.index("--uds") + 1]
env = os.environ
def log(event):
    with open(env["LOG"], "a") as file:
        file.write(json.dumps([event, dict(env)]) + "\\n")
def compiled(file):
    if env.get("VLLM_NEURON_DISABLE_WARMUP_COMPILE"):
        with open(env["OUTPUT"], "w") as output:
            output.write(env["SAYS"])
        sys.exit(1)
    log("compile")
    file.parent.mkdir(parents=True)
    (file.parent / "part").write_bytes(b"part")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while not pathlib.Path(env["GATE"]).exists():
        time.sleep(0.01)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    file.write_bytes(b"neff")
log("start")
if "NEURON_COMPILED_ARTIFACTS" in env:
    files = [pathlib.Path(env["NEURON_COMPILED_ARTIFACTS"], "model.pt")]
else:
    root = pathlib.Path(env["VLLM_CACHE_ROOT"])
    (root / "modelinfos").mkdir(parents=True, exist_ok=True)
    (root / "modelinfos" / "a.json").write_text(str(os.getpid()))
    files = [root / "neuron/compile_cache" / name / "graph.neff" for name in env["GRAPHS"].split()]
for file in files:
    if not file.exists():
        compiled(file)
if env.get("VLLM_NEURON_CPU_COMPILE") and env.get("EXITS"):
    sys.exit(int(env["EXITS"]))
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
socketserver.UnixStreamServer(uds, Handler).serve_forever()
"""
ROOT = """
import sys
import msgspec
from workers.messages.json_form import decoded
from workers.messages.replica_config import ReplicaConfig
from workers.engines.vllm import engine as vllm_engine
vllm_engine.GRACE_S = 0.5
server = vllm_engine.start_vllm(decoded(sys.argv[1].encode(), ReplicaConfig))
print("ready", flush=True)
sys.stdin.read()
server.stop()
"""


class Host:
    """A host with an interpreter that has a version of the plugin, and with a checkpoint."""

    def __init__(self, folder: Path, plugin: str) -> None:
        self.folder, self.log, self.gate = folder, folder / "log", folder / "gate"
        source = folder / "model"
        source.mkdir(parents=True)
        self.gate.touch()
        (source / "config.json").write_text(
            '{"model_type": "llama", "vocab_size": 64, "max_position_embeddings": 512, "eos_token_id": 1}'
        )
        (source / "model.safetensors").write_bytes(b"weights")
        self.install(plugin)
        self.config = replica_config(
            model="chat",
            engine="vllm",
            source=str(source),
            dtype="bf16",
            slots=4,
            max_len=128,
            tp_degree=2,
            compiled=str(folder / "compiled"),
            server_python=str(folder / "python"),
            env={
                "NEURON_RT_VISIBLE_CORES": "2-3",
                "NEURON_COMPILE_CACHE_URL": str(folder / "neuron"),
                "LOG": str(self.log),
                "GATE": str(self.gate),
                "GRAPHS": f"{'a' * 32} {'b' * 32}",
            },
        )

    def install(self, plugin: str, vllm: str = "0.24.0") -> None:
        site = self.folder / "site"
        package = site / "vllm/entrypoints/cli"
        package.mkdir(parents=True, exist_ok=True)
        (package / "main.py").write_text(SERVER)
        for name, version in {"vllm": vllm, "vllm_neuron": plugin, "neuronx_cc": "2.20"}.items():
            info = site / f"{name}.dist-info"
            info.mkdir(exist_ok=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        python = self.folder / "python"
        python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
        python.chmod(0o755)

    def events(self) -> list[tuple[str, dict[str, str]]]:
        return [tuple(json.loads(line)) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def compiles(self) -> int:
        return [event for event, _ in self.events()].count("compile")

    def start(self, **changes: Any) -> dict[str, str]:
        """Starts and stops a server. Returns its environment."""
        config = changed(self.config, **changes)
        before = len(self.events())
        start_vllm(config).stop()
        return self.events()[before][1]

    def wanted(self, **changes: Any) -> Wanted:
        (reply,) = self.replies("predict", read=True, **changes)
        assert isinstance(reply, Predicted)
        (unit,) = reply.wanted
        return unit

    def replies(self, command: str, *, read: bool = False, push: bool = False, **changes: Any) -> list[Reply]:
        replies: list[Reply] = []
        config = changed(self.config, **changes)
        prepare.run(command, Order(config=config, read=read, push=push), replies.append)
        return replies


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "neuron"))


# Each test of a plugin starts several processes, and most promises are the same for both.
one_plugin = pytest.mark.parametrize(
    "host", [NXD, pytest.param(NEURON, marks=pytest.mark.slow)], ids=["nxd", "neuron"], indirect=True
)


@pytest.fixture(params=[NXD, NEURON], ids=["nxd", "neuron"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Host:
    return Host(tmp_path / "a", request.param)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


def replica(config: ReplicaConfig) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", ROOT, encoded(config).decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )


def test_a_compilation_without_room_for_its_weights_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plugin on NxD Inference keeps a copy of them with its graphs."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=6))
    config = Host(tmp_path / "a", NXD).config
    with (
        pytest.raises(EngineLoadError) as refused,
        entry(tmp_path / "sets", {"engine": "vllm"}) as held,
        filling(config, "nxd", held),
    ):
        pass
    assert refused.value.id == "disk-full"


def test_a_second_start_compiles_nothing(host: Host) -> None:
    """It gets the folder of the first one, which was complete once its server was ready."""
    before = host.wanted()
    host.start()
    compiles = host.compiles()
    assert not before.complete
    after = host.wanted()
    assert after == msgspec.structs.replace(before, complete=True, prediction=after.prediction)
    host.start(model="another name", socket="")
    assert host.compiles() == compiles > 0


def test_only_what_a_start_of_the_later_plugin_needs_is_kept(tmp_path: Path) -> None:
    """Its folder has vLLM's other caches, too, which differ from start to start."""
    host = Host(tmp_path, NEURON)
    host.start()
    record = json.loads((Path(host.wanted().folder) / "corewright.lock.json").read_text())
    assert sorted({Path(name).parts[2] for name in record["files"]}) == ["a" * 32, "b" * 32]
    assert host.start().items() >= NO_COMPILE.items()
    assert host.wanted().complete


@pytest.mark.parametrize(
    "changes",
    [
        {"tp_degree": 4},
        {"slots": 8},
        {"max_len": 256},
        {"dtype": "fp32"},
        {"engine_options": {"max_num_batched_tokens": 256}},
        {"engine_options": {"additional_config": {"override_neuron_config": {"fused_qkv": True}}}},
        {"engine_options": {"additional_config": {"override_neuron_config": {"fused_qkv": False}}}},
        {"env": {"VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION": "0.5"}},
    ],
    ids=str,
)
def test_each_setting_has_a_folder_of_its_own(host: Host, changes: dict[str, Any]) -> None:
    """The plugin on NxD Inference loads artifacts of other settings with no more than a warning."""
    if "env" in changes:
        changes = {"env": host.config.place.env | changes["env"]}
    assert host.wanted(**changes).key != host.wanted().key


def test_compiler_flags_are_in_the_key_of_the_plugin_that_reads_them(host: Host) -> None:
    """The later plugin has flags of its own, which these would replace, so it never gets them."""
    flagged = host.wanted(env=host.config.place.env | {"NEURON_CC_FLAGS": "-O1"})
    assert (flagged.key != host.wanted().key) == (flagged.manifest["plugin"] == "nxd")


@pytest.mark.parametrize(
    "change",
    [
        lambda host: host.install("0.5.0" if host.wanted().manifest["plugin"] == "nxd" else "0.21.0.1.0.0"),
        lambda host: host.install(host.wanted().manifest["versions"]["vllm-neuron"], vllm="0.25.0"),
        lambda host: Path(host.config.source, "config.json").write_text('{"model_type": "llama", "vocab_size": 65}'),
    ],
    ids=["plugin", "vllm", "config.json"],
)
def test_versions_and_the_model_are_in_the_key(host: Host, change: Callable[[Host], object]) -> None:
    """A start with another version or another model compiles."""
    before = host.wanted().key
    change(host)
    assert host.wanted().key != before


def test_only_folders_with_weights_depend_on_them(host: Host) -> None:
    """Those of the plugin on NxD Inference have sharded weights, so they need all digests."""
    assert host.config.source is not None
    before = host.wanted().key
    Path(host.config.source, "model.safetensors").write_bytes(b"others")
    is_nxd = host.wanted().manifest["plugin"] == "nxd"
    assert (host.wanted().key != before) == is_nxd
    assert bool(_unread(host)) == is_nxd


def _unread(host: Host) -> list[str]:
    assert host.config.source is not None
    Path(host.config.source, "model.safetensors").write_bytes(b"unread weights")
    (reply,) = host.replies("predict")
    assert isinstance(reply, Predicted)
    return reply.wanted[0].unread


def test_cores_and_the_place_of_a_checkpoint_are_not_in_the_key(host: Host, tmp_path: Path) -> None:
    """A start on other cores, or of a copy of the model, finds the same folder."""
    copied = Path(str(host.config.source)).rename(tmp_path / "copy")
    env = host.config.place.env | {"NEURON_RT_VISIBLE_CORES": "8-9"}
    after = host.wanted(env=env, source=str(copied), socket="/tmp/x/s")
    copied.rename(str(host.config.source))
    assert after.key == host.wanted().key


@one_plugin
def test_replicas_of_one_key_compile_once(host: Host) -> None:
    """The second one waits for the first, and then loads its result."""
    host.gate.unlink()
    first = replica(host.config)
    try:
        until(lambda: host.compiles() == 1, DEADLINE_S, "the first one compiles")
        second = replica(host.config)
        try:
            host.gate.touch()
            assert [process.stdout and process.stdout.readline() for process in (first, second)] == ["ready\n"] * 2
            graphs = 1 if "nxd" in host.wanted().manifest["plugin"] else 2
            assert host.compiles() == graphs
        finally:
            second.communicate("")
    finally:
        first.communicate("")


@one_plugin
def test_a_killed_compilation_leaves_nothing_complete(host: Host) -> None:
    """Its folder stays locked until its server is gone, and the next start compiles."""
    host.gate.unlink()
    lock = Path(f"{host.wanted().folder}.lock")
    process = replica(host.config)
    until(lambda: host.compiles() == 1, DEADLINE_S, "it compiles")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert file_lock.is_locked(lock)
    assert not host.wanted().complete
    until(lambda: not file_lock.is_locked(lock), DEADLINE_S, "its server has ended")
    process.communicate()
    host.gate.touch()
    host.start()
    assert host.wanted().complete


def test_a_server_that_fails_leaves_nothing_complete(tmp_path: Path) -> None:
    """Complete is what its server has loaded."""
    host = Host(tmp_path, NEURON)
    failing = host.config.place.env | {"VLLM_NEURON_CPU_COMPILE": "1", "EXITS": "3"}
    with pytest.raises(EngineLoadError, match="exit code 3"):
        host.start(env=failing)
    assert host.compiles() == 2
    assert not host.wanted(env=failing).complete


@pytest.mark.parametrize(("logged", "is_named"), [("local compile cache miss for key c", True), ("no KV", False)])
def test_a_missing_graph_of_a_complete_set_is_an_error(tmp_path: Path, logged: str, is_named: bool) -> None:
    """It is not compiled on the cores; the set is named if the server's output has that cause."""
    host = Host(tmp_path, NEURON)
    host.start()
    folder, log = host.wanted().folder, str(tmp_path / "output")
    with pytest.raises(EngineLoadError) as raised:
        host.start(env=host.config.place.env | {"GRAPHS": "c" * 32, "OUTPUT": log, "SAYS": logged}, log=log)
    assert (folder in raised.value.hint) == is_named
    assert host.compiles() == 2


@one_plugin
def test_a_set_goes_to_another_host(host: Host, tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is pushed after the server was ready, and fetched by a start, by which nothing is compiled."""
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    cache = f"{s3.bucket()}/neffs"
    host.start(neff_cache=cache)
    other = Host(tmp_path / "b", str(host.wanted().manifest["versions"]["vllm-neuron"]))
    config = changed(other.config, neff_cache=cache, log=str(tmp_path / "log"))
    for thread in threading.enumerate():
        if thread.name == "neff-push":
            thread.join(DEADLINE_S)
    assert _verified(config).where == "elsewhere"
    missing = preparation.foresee(config, threading.Event()).missing
    assert missing == ["model: its neff_cache has artifacts compiled by another host"]
    other.start(neff_cache=cache)
    assert (other.compiles(), other.wanted().complete) == (0, True)


def test_compile_fetches_what_only_a_device_compiles(tmp_path: Path, s3: S3Server, monkeypatch: Any) -> None:
    """A host without devices then has the set for a start on its cores."""
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    cache = f"{s3.bucket()}/neffs"
    host, other = Host(tmp_path / "a", NXD), Host(tmp_path / "b", NXD)
    host.start()
    assert isinstance(host.replies("compile", push=True, neff_cache=cache)[-1], Built)
    assert isinstance(other.replies("compile", neff_cache=cache)[-1], Built)
    assert _verified(other.config).where == "compiled"


@pytest.mark.parametrize(("plugin", "drafts"), [(NXD, False), (NEURON, True)], ids=["nxd", "draft"])
def test_the_plugin_on_nxd_inference_and_drafts_are_compiled_only_on_cores(
    plugin: str, drafts: bool, tmp_path: Path
) -> None:
    """`corewright compile` reports it, and leaves no folder behind."""
    host = Host(tmp_path, plugin)
    if drafts:
        host.config = changed(host.config, draft_source=host.config.source, draft_k=2, draft_method="eagle3")
    reply = host.replies("compile")[-1]
    assert isinstance(reply, Trouble)
    assert reply.failure.id == NEEDS_DEVICE
    assert not host.wanted().ahead
    assert not Path(host.wanted().folder).exists()


@pytest.mark.parametrize("exits", ["", "0"], ids=["serves", "exits"])
def test_the_later_plugin_is_compiled_ahead(tmp_path: Path, exits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command runs without devices, and a start with cores compiles nothing."""
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
    host = Host(tmp_path, NEURON)
    env = {name: value for name, value in host.config.place.env.items() if name != "NEURON_RT_VISIBLE_CORES"}
    built = host.replies("compile", env=env | {"EXITS": exits})[-1]
    assert isinstance(built, Built)
    _, seen = host.events()[0]
    assert (seen["VLLM_NEURON_CPU_COMPILE"], seen["NEURON_PLATFORM_TARGET_OVERRIDE"]) == ("1", "trn2")
    assert "NEURON_VISIBLE_DEVICES" not in seen
    compiles = host.compiles()
    assert host.start()["NEURON_VISIBLE_DEVICES"] == "2-3"
    assert (compiles, host.compiles()) == (2, 2)


def test_a_failed_compilation_ahead_leaves_nothing_complete(tmp_path: Path) -> None:
    """An exit code other than 0 is a failure, also after all graphs were written."""
    host = Host(tmp_path, NEURON)
    assert isinstance(host.replies("compile", env=host.config.place.env | {"EXITS": "3"})[-1], Trouble)
    assert not host.wanted().complete


@one_plugin
def test_the_difference_of_a_start_is_shown(host: Host) -> None:
    """`cache verify` names the setting."""
    host.start()
    prediction = _verified(changed(host.config, slots=8))
    assert "batch_size: needs 8, found 4" in map(str, prediction.why)


def test_without_a_folder_the_variable_is_set_as_well(tmp_path: Path) -> None:
    """Otherwise the plugin compiles into the model's folder, and removes it at each start."""
    host = Host(tmp_path, NXD)
    seen = host.start(compiled=None)
    assert not seen["NEURON_COMPILED_ARTIFACTS"].startswith(str(host.config.source))


def _verified(config: ReplicaConfig) -> Any:
    wanted = preparation.verify(config, read=True)
    assert isinstance(wanted, list)
    return wanted[0].prediction
