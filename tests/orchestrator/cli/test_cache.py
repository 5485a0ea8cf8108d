"""`corewright cache`: what the commands tell, their exit codes, and what they leave."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli import main as cli
from orchestrator.control.resolve import offline_configs
from tests.checkpoints import make_checkpoint
from tests.doubles.machine import make_interpreter
from tests.s3 import FaultProxy, S3Server
from tests.workers.fake_remote import FakeRemote
from tests.workers.neffs import COMPILER, finished, graph
from tests.workers.tnx_runs import config as tnx
from workers.artifacts.store.artifact_uses import using
from workers.artifacts.store.store import Store, StoreSettings
from workers.compiled import neuron_cache, neuron_target, preparation, shared_sets
from workers.compiled.host_sets import MANIFEST, entry
from workers.compiled.neuron_cache import read_entries
from workers.compiled.prediction import LATER, Prediction
from workers.compiled.storage import storage_at
from workers.host.neuron_faults import fault_of
from workers.messages.json_form import encoded
from workers.messages.replica_config import ReplicaConfig

ECHO = "hosts: {emulate: inf2.xlarge}\nmodels: {parrot: {engine: echo}}\n"
TNX = """\
hosts: {{emulate: inf2.xlarge}}
engines: {{transformers-neuronx: {{python: {python}}}}}
models:
  llama:
    source: ./llama
    engine: transformers-neuronx
    dtype: fp32
    tp_degree: 2
    max_len: 64
    max_batch: 2
    {more}
"""
NEWER = "2.17.194.0+d312836f"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This host's, with a NEFF cache of its own."""
    monkeypatch.setattr(neuron_cache, "compilers", list)
    monkeypatch.setattr(neuron_cache, "SETTLE_S", 0.0)
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "neffs"))
    monkeypatch.delenv("NEURON_CC_FLAGS", raising=False)
    (tmp_path / "home").mkdir()
    (tmp_path / "neffs").mkdir()
    return tmp_path / "home"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any]]:
    """A command with JSON; its exit code and what it tells."""

    def ran(*arguments: str) -> tuple[int, Any]:
        code = cli.run(["cache", *arguments, "-o", "json"])
        return code, json.loads(capsys.readouterr().out or "null")

    return ran


def compiled(home: Path, **manifest: Any) -> Path:
    with entry(home / "compiled", {"engine": "transformers-neuronx", **manifest}) as held:
        (held.path / "a.neff").write_text("NEFF")
        held.finish("/models/chat")
    return held.path


def test_ls_shows_the_state_of_every_graph_and_entry(
    home: Path, tmp_path: Path, run: Callable[..., tuple[int, Any]]
) -> None:
    finished(tmp_path / "neffs")
    graph(tmp_path / "neffs", "2" * 20, **{"model.log": "neuronx-cc failed with 70"})
    whole, damaged = compiled(home), compiled(home, lnc=2)
    (damaged / "a.neff").write_text("XXXX")
    code, report = run("ls")
    assert code == 0
    (cache,) = report["caches"]
    assert cache["place"] == str(tmp_path / "neffs")
    assert {entry["key"]: (entry["state"], entry["words"]) for entry in cache["entries"]} == {
        "2" * 20: ("FAILED", "neuronx-cc failed with 70"),
        "cd73c69136bf675613f6": ("SUCCESS", ""),
    }
    states = {item["name"]: (item["state"], item["damaged"], item["source"]) for item in report["compiled"]}
    assert states == {
        whole.name: ("whole", [], "/models/chat"),
        damaged.name: ("damaged", ["a.neff"], "/models/chat"),
    }
    assert report["models"] == []


def test_ls_of_an_invalid_spec_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Instead of showing its caches as empty."""
    assert cli.run(["cache", "ls", str(tmp_path / "nope.yaml")]) == 1
    assert "spec-unreadable" in capsys.readouterr().err
    (tmp_path / "bad.yaml").write_text("models: {x: {engine: cpu}}")
    assert cli.run(["cache", "ls", str(tmp_path / "bad.yaml")]) == 1


@pytest.mark.parametrize("command", ["ls", "prune", "retry"])
def test_a_missing_cache_is_reported(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is not shown as empty."""
    assert cli.run(["cache", command, "--cache", "nonsense"]) == 1
    assert "neff-cache-unreadable: nonsense is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_ls_shows_pushed_artifacts(
    kind: str,
    home: Path,
    tmp_path: Path,
    s3_server: S3Server,
    run: Callable[..., tuple[int, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Complete sets, and the leftovers of a killed upload, in a folder and in S3."""
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    place = s3_server.bucket() if kind == "s3" else str(tmp_path / "shared")
    manifests = [{"engine": "transformers-neuronx", "lnc": lnc} for lnc in range(2)]
    names = [compiled(home, lnc=lnc).name for lnc in range(2)]
    for manifest in manifests:
        with entry(home / "compiled", manifest) as held:
            shared_sets.push(held, place)
    there = storage_at(place)
    there.put_bytes(f"{shared_sets.FOLDER}/dead/a.neff", b"NEFF")
    spec = tmp_path / "spec.yaml"
    fields = f"source: /models/chat, engine: cpu, neff_cache: {place}"
    spec.write_text(f"hosts: {{emulate: inf2.xlarge}}\nmodels: {{chat: {{{fields}}}}}\n")
    _, report = run("ls", str(spec))
    (pushed,) = [cache["pushed"] for cache in report["caches"] if cache["place"] == place]
    assert {row["name"]: (row["state"], row["source"]) for row in pushed} == {
        **dict.fromkeys(names, ("whole", "/models/chat")),
        "dead": ("unfinished", None),
    }
    assert all(row["bytes"] > 0 for row in pushed)


def test_a_set_compiled_from_a_fetched_model_shows_its_source(
    home: Path, tmp_path: Path, run: Callable[..., tuple[int, Any]]
) -> None:
    """Not the folder of the store to which it was fetched."""
    artifact = Store(home / "store").get(FakeRemote({"config.json": b"{}"}, source="s3://models/chat"))
    with entry(home / "compiled", {"engine": "cpu"}) as made:
        made.finish(artifact.folder)
    _, report = run("ls")
    assert [item["source"] for item in report["compiled"]] == ["s3://models/chat"]


def test_a_dry_run_lists_the_models_to_remove(
    home: Path, run: Callable[..., tuple[int, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that would be removed, and none in use."""
    store = Store(home / "store", grace_s=0.0)
    monkeypatch.setattr(StoreSettings, "open", lambda _: store)
    idle, used = (store.get(FakeRemote({"config.json": name}, source=f"s3://models/{name!r}")) for name in (b"a", b"b"))
    with using(used.folder):
        said = [item["path"] for item in run("prune", "--models", "--dry-run")[1]["removed"]]
        assert Path(idle.folder).is_dir()
        gone = [item["path"] for item in run("prune", "--models")[1]["removed"]]
    assert said == gone == [idle.folder]
    assert [Path(artifact.folder).is_dir() for artifact in (idle, used)] == [False, True]


def test_an_invalid_unrelated_setting_stops_no_command(
    home: Path, run: Callable[..., tuple[int, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An invalid setting of the store does, and its place is reported once."""
    monkeypatch.setenv("COREWRIGHT_PORT", "none")
    assert run("ls")[0] == 0
    monkeypatch.setenv("COREWRIGHT_STORE_BYTES", "none")
    assert cli.run(["cache", "ls"]) == 1
    assert "error: setting-wrong: COREWRIGHT_STORE_BYTES: store_bytes must be" in capsys.readouterr().err


def test_ls_prints_a_table(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished(tmp_path / "neffs")
    compiled(home)
    assert cli.run(["cache", "ls"]) == 0
    output = capsys.readouterr().out
    assert f"{COMPILER}  MODULE_cd73c69136bf675613f6+2c2d707e  SUCCESS" in output
    assert "/models/chat" in output


def test_retry_removes_failures(tmp_path: Path, home: Path, run: Callable[..., tuple[int, Any]]) -> None:
    """And the audit log has it."""
    failed = graph(tmp_path / "neffs", **{"model.log": "neuronx-cc failed with 70"})
    code, report = run("retry", "--dry-run")
    assert (code, [item["path"] for item in report["removed"]], failed.exists()) == (0, [str(failed)], True)
    run("retry", failed.name)
    assert not failed.exists()
    assert '"cache retry"' in (home / "audit.log").read_text()
    assert run("retry")[1]["removed"] == []


def test_the_error_of_a_cached_failure_has_the_command_that_fixes_it(
    tmp_path: Path, run: Callable[..., tuple[int, Any]]
) -> None:
    """Ready to run: it removes that graph in that cache, and no other."""
    cache = tmp_path / "fleet"
    failed, other = (graph(cache, key, **{"model.log": "neuronx-cc failed with 70"}) for key in ("1" * 20, "2" * 20))
    fault = fault_of(None, [f"ERROR: Got a cached failed neff at {failed}/model.neff. Will skip compilation"])
    assert fault is not None
    assert fault.id == "compile-cached-failure"
    words = shlex.split(fault.hint.split("`")[1])
    assert words[:3] == ["corewright", "cache", "retry"]
    run(*words[2:])
    assert (failed.exists(), other.exists()) == (False, True)


def test_a_cached_failure_without_a_known_cache_has_the_command_too() -> None:
    """For all of this host's caches."""
    fault = fault_of(None, ["Got a cached failed neff."])
    assert fault is not None
    assert "`corewright cache retry`" in fault.hint


def test_prune_removes_unusable_entries(tmp_path: Path, home: Path, run: Callable[..., tuple[int, Any]]) -> None:
    """Unfinished, damaged and old ones; not those in use, nor valid ones."""
    good, old, damaged, unfinished, held = (compiled(home, lnc=lnc) for lnc in range(5))
    (damaged / "a.neff").unlink()
    (unfinished / MANIFEST).unlink()
    for path in (old, old.with_name(f"{old.name}.lock"), held, held.with_name(f"{held.name}.lock")):
        os.utime(path, (1e9, 1e9))
    with entry(home / "compiled", {"engine": "transformers-neuronx", "lnc": 4}) as kept:
        assert kept.complete
        os.utime(held.with_name(f"{held.name}.lock"), (1e9, 1e9))
        code, report = run("prune", "--older-than", "7")
    assert code == 0
    assert {Path(item["path"]) for item in report["removed"]} == {old, damaged, unfinished}
    assert [path.exists() for path in (good, old, damaged, unfinished, held)] == [True, False, False, False, True]


def test_prune_does_not_change_s3(capsys: pytest.CaptureFixture[str]) -> None:
    """Other hosts need its content."""
    assert cli.run(["cache", "prune", "--cache", "s3://neffs/chat"]) == 1
    assert "cache-elsewhere" in capsys.readouterr().err


def test_verify_is_a_hit_if_nothing_is_compiled(tmp_path: Path, run: Callable[..., tuple[int, Any]]) -> None:
    """Exit code 0."""
    (tmp_path / "spec.yaml").write_text(ECHO)
    code, report = run("verify", str(tmp_path / "spec.yaml"))
    assert (code, report["hit"]) == (0, True)
    assert [(model["model"], model["outcome"]) for model in report["models"]] == [("parrot", "hit")]


def test_verify_reports_an_unreachable_source(
    tmp_path: Path, run: Callable[..., tuple[int, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a missing folder."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    fields = "source: me/chat, engine: cpu, engine_options: {compile: true}"
    (tmp_path / "spec.yaml").write_text(f"hosts: {{instance: inf2.xlarge}}\nmodels: {{chat: {{{fields}}}}}\n")
    code, report = run("verify", str(tmp_path / "spec.yaml"))
    (model,) = report["models"]
    assert (code, model["outcome"], model["source"]) == (1, "fail", "me/chat")
    assert model["reason"].startswith(
        "checkpoint-unreadable: chat: its config.json cannot be read: me/chat: HF_HUB_OFFLINE"
    )


def test_a_cached_failure_in_a_models_own_cache_has_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`cache retry` alone would not search there; it does search this host's own caches."""
    from orchestrator.cli import cache
    from orchestrator.control.resolve.offline_configs import OfflineConfig

    own = tmp_path / "own"
    own.mkdir()
    env = {"NEURON_COMPILE_CACHE_URL": str(own)}
    of = OfflineConfig(model="chat", config=tnx(tmp_path, env=env, compiled=str(tmp_path / "home" / "compiled")))
    reason = f"the cache has a failed compilation; {LATER}"
    prediction = Prediction("fail", "neff-cache", reason, str(own), failed=("a",))
    assert f"`corewright cache retry --cache {own}`" in cache._reason(of, prediction)
    assert cache._reason(of, dataclasses.replace(prediction, place=str(tmp_path / "neffs"))) == reason


def test_every_command_sets_the_target_of_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the machine does not have the spec's devices; an emulated host is the machine."""
    from orchestrator.control.resolve.offline_configs import configs
    from orchestrator.control.resolve.spec_file import load
    from orchestrator.process.home import Home

    async def as_told(config: ReplicaConfig, *_: Any) -> ReplicaConfig:
        return config

    monkeypatch.setattr(offline_configs, "resolve_engine", as_told)
    monkeypatch.delenv(neuron_target.OVERRIDE, raising=False)
    make_checkpoint(tmp_path / "llama", "llama")
    spec = tmp_path / "spec.yaml"
    targets = []
    for kind in ("instance", "emulate"):
        spec.write_text(TNX.format(python="python", more="").replace("emulate", kind))
        for heads in (True, False):
            (replica_config,) = configs(load(str(spec)), Home(tmp_path / "home"), heads=heads)
            assert isinstance(replica_config.config, ReplicaConfig)
            targets.append(replica_config.config.place.env.get(neuron_target.OVERRIDE))
    assert targets == ["trn1", "trn1", None, None]


def test_an_unknown_model_is_reported_with_the_known_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "spec.yaml").write_text(ECHO)
    assert cli.run(["cache", "verify", str(tmp_path / "spec.yaml"), "--model", "chat"]) == 1
    assert "it has parrot" in capsys.readouterr().err


# In the interpreter of an engine


@pytest.fixture
def neuron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a spec of a Llama whose interpreter has the stand-ins and a compiler of that version."""
    monkeypatch.setenv("NEURON_DOUBLE_STATE", str(tmp_path / "cores"))
    make_checkpoint(tmp_path / "llama", "llama")

    def wrote(compiler: str = COMPILER, more: str = "") -> Path:
        monkeypatch.setenv("NEURON_DOUBLE_CC_VERSION", compiler)
        folder = tmp_path / f"venv-{compiler}"
        python = folder / "bin/python"
        if not folder.exists():
            python = make_interpreter(folder, instead={"neuronx_cc": compiler})
        (tmp_path / "spec.yaml").write_text(TNX.format(python=python, more=more))
        return tmp_path / "spec.yaml"

    return wrote


def compile_ahead(spec: Path, home: Path) -> None:
    """As `corewright compile` does, in the interpreter of the engine; without a device."""
    from orchestrator.control.resolve.offline_configs import configs
    from orchestrator.control.resolve.spec_file import load
    from orchestrator.process.home import Home
    from workers.compiled.orders import Order
    from workers.messages.replica_config import ReplicaConfig

    (replica_config,) = configs(load(str(spec)), Home(home), heads=True)
    config = replica_config.config
    assert isinstance(config, ReplicaConfig)
    done = subprocess.run(
        [config.run.python or sys.executable, "-m", "workers.serving.prepare", "compile"],
        input=encoded(Order(config=config)),
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, (done.stdout, done.stderr[-2000:])


@pytest.mark.slow
def test_the_engines_interpreter_is_queried_and_another_host_is_warmed(
    tmp_path: Path,
    home: Path,
    neuron: Callable[..., Path],
    run: Callable[..., tuple[int, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its compiler version counts, the query claims no core, and compiled artifacts come from S3."""
    with S3Server() as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        more = f"neff_cache: {server.bucket('neffs')}"
        compile_ahead(neuron(more=more), home)
        code, report = run("verify", str(neuron(more=more)))
        assert (code, report["models"][0]["where"]) == (0, "compiled")
        code, report = run("verify", str(neuron(compiler=NEWER, more=more)))
        assert code == 1
        assert report["models"][0]["why"] == [{"field": "compiler version", "wanted": NEWER, "found": COMPILER}]
        assert not list((tmp_path / "cores").glob("*core*"))
        monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "another"))
        code, report = run("warm", str(neuron(more=more)))
        assert (code, report["models"][0]["problem"]) == (0, "")
        assert report["models"][0]["bytes"] > 0
    (local,) = (tmp_path / "another" / "neff").iterdir()
    (first,) = (home / "neff").iterdir()
    assert {kept.name for kept in read_entries(local)} == {kept.name for kept in read_entries(first)}


@pytest.mark.slow
def test_artifacts_compiled_without_devices_are_found_by_verify_and_warm(
    tmp_path: Path,
    neuron: Callable[..., Path],
    run: Callable[..., tuple[int, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a build machine: what `compile` has created and pushed is fetched by another machine."""
    spec = neuron(more=f"neff_cache: {tmp_path}/shared")
    spec.write_text(spec.read_text().replace("{emulate: inf2.xlarge}", "{instance: inf2.xlarge}"))
    assert cli.run(["compile", str(spec), "--push"]) == 0
    capsys.readouterr()
    code, report = run("verify", str(spec))
    assert (code, report["models"][0]["where"]) == (0, "compiled")
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "another"))
    code, report = run("warm", str(spec))
    assert (code, report["models"][0]["brought"]) == (0, ["compiled model"])
    assert run("verify", str(spec))[0] == 0


@pytest.mark.slow
def test_the_weights_of_compiled_models_are_not_fetched(
    tmp_path: Path,
    neuron: Callable[..., Path],
    s3_server: S3Server,
    s3_proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By another machine that compiles the same spec, nor by this one again. If the artifacts are gone before they are
    fetched, the weights are fetched and compiled.
    """
    checkpoint = {f"llama/{file.name}": file.read_bytes() for file in (tmp_path / "llama").iterdir()}
    source, weights = f"{s3_server.bucket(files=checkpoint)}/llama", "llama/model.safetensors"
    spec = neuron(more=f"neff_cache: {tmp_path}/shared")
    spec.write_text(spec.read_text().replace("./llama", source))

    def compiled(home: str) -> tuple[str, int]:
        monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / home))
        s3_proxy.forget()
        code = cli.run(["compile", str(spec), "--push", "-o", "json"])
        (model,) = json.loads(capsys.readouterr().out)["models"]
        assert (code, model["failure"]) == (0, None)
        return model["result"], s3_proxy.bytes(weights)

    size = len(checkpoint[weights])
    assert compiled("home") == ("compiled", size)
    assert compiled("another") == ("pulled", 0)
    assert compiled("another") == ("there", 0)
    run_process = preparation.run_process

    def lost(command: Any, *arguments: Any, **options: Any) -> Any:
        if command == "compile":
            shutil.rmtree(tmp_path / "shared", ignore_errors=True)
        return run_process(command, *arguments, **options)

    monkeypatch.setattr(preparation, "run_process", lost)
    assert compiled("third") == ("compiled", size)


@pytest.mark.slow
def test_a_warm_without_a_result_leaves_nothing(
    tmp_path: Path, home: Path, neuron: Callable[..., Path], run: Callable[..., tuple[int, Any]]
) -> None:
    """No unfinished set that `ls` would show."""
    (tmp_path / "shared").mkdir()
    code, _ = run("warm", str(neuron(more=f"neff_cache: {tmp_path}/shared")))
    assert code == 0
    assert run("ls")[1]["compiled"] == []
