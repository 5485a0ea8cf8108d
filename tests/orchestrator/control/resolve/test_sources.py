"""Specs whose models lie in S3 or on the hub: what commands and the daemon learn of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli import main as cli
from orchestrator.control.journal.journal_records import Revision
from orchestrator.control.resolve.resolved_revision import ResolvedRevision, resolve_revision
from orchestrator.control.resolve.spec_file import SpecFile, examine, start_problems
from placements.facts.topology import Machine
from placements.planner.plan import plan
from tests.hub import HubServer, Repo
from tests.s3 import ACCESS_KEY, SECRET_KEY, SESSION_TOKEN, S3Server
from tests.stubs import stub_checkpoint
from workers.messages.replica_config import DRAFT, Origin

TINY = Path(__file__).parents[4] / "placements" / "examples" / "models" / "tiny"
MODEL = {file.name: file.read_bytes() for file in TINY.iterdir() if file.is_file()}
LAPTOP = Machine(cpus=(0, 1, 2, 3))
SPLIT = ("pytorch_model.bin/p0.safetensors", "pytorch_model.bin/key_to_filename.json")
HOSTS = "hosts: {emulate: inf2.48xlarge}\nengines: {vllm: {python: /vllm/bin/python}}\n"


@pytest.fixture(scope="module")
def bucket() -> Iterator[S3Server]:
    with S3Server() as server:
        server.bucket("models", {f"tiny/{name}": data for name, data in MODEL.items()})
        yield server


@pytest.fixture
def s3(bucket: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for name, value in bucket.env.items():
        monkeypatch.setenv(name, value)
    return bucket


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    from huggingface_hub import constants

    with HubServer() as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        server.repos["org/tiny"] = Repo()
        server.repos["org/tiny"].commit(MODEL)
        yield server


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("workers.artifacts.sources.source_metadata.PATIENCE_S", 0.0)
    return tmp_path / "home"


def read(models: str, base_dir: Path | str = ".") -> SpecFile:
    return examine(f"{HOSTS}models: {{{models}}}\n", "f.yaml", str(base_dir), LAPTOP)


def problems(file: SpecFile) -> list[tuple[str, str]]:
    return [(problem.id, problem.severity) for problem in file.problems]


def revision(models: str, number: int = 1, fleet: str = "f1") -> Revision:
    text = f"{HOSTS}models: {{{models}}}\n"
    return Revision(number=number, fleet=fleet, cause="up", by="", text=text, file="f", base_dir="/", of=None, plan={})


def generation(models: str, number: int = 1, fleet: str = "f1") -> ResolvedRevision:
    return resolve_revision(revision(models, number, fleet), LAPTOP)


def commit(resolved: ResolvedRevision, name: str = "a") -> str | None:
    model = resolved.spec.model(name)
    assert model is not None
    return resolved.commit(model)


def test_models_elsewhere_are_planned_as_a_folder_is(s3: S3Server, hub: HubServer) -> None:
    """The same rules judge them, and nothing keeps `up` from starting them."""
    sources = {"a": str(TINY), "b": "s3://models/tiny", "c": "org/tiny", "d": "s3://models/tiny/"}
    file = read(", ".join(f"{name}: {{source: {source}, max_len: 64}}" for name, source in sources.items()))
    assert problems(file) == []
    assert file.checkpoints["a"] == file.checkpoints["b"] == file.checkpoints["c"] == file.checkpoints["d"]
    assert start_problems(file) == ()
    assert file.spec is not None
    assert plan(file.spec, file.hosts, file.checkpoints).placements


def test_a_rule_that_needs_the_config_judges_a_model_in_s3(s3: S3Server) -> None:
    """More positions than it has."""
    assert ("max-len-exceeds-positions", "error") in problems(read("a: {source: s3://models/tiny, max_len: 9999999}"))


def test_no_weights_are_fetched_to_plan(hub: HubServer) -> None:
    """Only the config and the tokenizer."""
    read("a: {source: org/tiny}, b: {source: org/tiny}, c: {source: org/tiny, draft: {source: org/tiny}}")
    assert len([request for request in hub.asked if request.path.startswith("/api/models")]) == 1
    assert [request.path for request in hub.asked if "safetensors" in request.path] == []


def test_an_unreachable_source_is_planned_with_its_stored_metadata(hub: HubServer) -> None:
    """With a warning; one that was never read gives the warning of an unreadable config."""
    before = read("a: {source: org/tiny}")
    hub.away()
    after = read("a: {source: org/tiny}, b: {source: org/other}")
    assert after.checkpoints == before.checkpoints
    assert problems(after) == [("source-away", "warning"), ("checkpoint-unreadable", "warning")]


def test_a_missing_source_is_reported_by_name(s3: S3Server, hub: HubServer) -> None:
    """Warnings, since the hosts may have other permissions; each at its own key."""
    file = read("a: {source: s3://models/none}, b: {source: s3://nobody/x}, c: {source: org/none}")
    assert problems(file) == [("checkpoint-unreadable", "warning")] * 3
    texts = [problem.what for problem in file.problems]
    for text, name in zip(texts, ("s3://models/none", "nobody", "org/none"), strict=True):
        assert name in text


@pytest.mark.parametrize(
    ("files", "fields", "expected"),
    [
        (("pytorch_model.bin",), "", [("pickle-refused", "error")]),
        (("pytorch_model.bin",), ", allow_pickle: true", []),
        (("weights/tp0_sharded_checkpoint.safetensors",), ", engine: cpu", [("layout-unsupported", "error")]),
        (("weights/tp0_sharded_checkpoint.safetensors",), "", []),  # auto may become nxd-inference
        (SPLIT, ", engine: cpu", [("layout-unsupported", "error")]),
        (SPLIT, "", []),  # auto may become transformers-neuronx
    ],
)
def test_pickles_and_layouts_are_rejected_before_anything_is_fetched(
    hub: HubServer, files: tuple[str, ...], fields: str, expected: list[tuple[str, str]]
) -> None:
    """Errors at the source's line, without a byte of the weights."""
    small = {name: MODEL[name] for name in ("config.json", "tokenizer.json")}
    hub.repos["org/other"] = Repo()
    hub.repos["org/other"].commit({**small, **dict.fromkeys(files, b"{}")})
    assert problems(read(f"a: {{source: org/other{fields}}}")) == expected
    assert [request.path for request in hub.asked if files[0] in request.path] == []


SHARDS = [f"weights/tp{rank}_sharded_checkpoint.safetensors" for rank in range(4)]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("tp_degree: 4", []),
        ("tp_degree: 2", ["artifacts-mismatch"]),
        ("tp_degree: 4, dtype: fp16", ["artifacts-mismatch"]),
        ("tp_degree: 4, draft: {source: org/none}", ["checkpoint-unreadable"]),
        ("tp_degree: 4, draft: {source: org/tiny}", ["layout-unsupported"]),
    ],
)
def test_a_mismatched_sharding_is_reported_before_anything_is_fetched(
    hub: HubServer, fields: str, expected: list[str]
) -> None:
    """At the source's line, by its name. With an unknown draft nothing is reported."""
    recorded = {"neuron_config": {"tp_degree": 4, "torch_dtype": "bfloat16"}}
    hub.repos["org/divided"] = Repo()
    hub.repos["org/divided"].commit(
        {"config.json": MODEL["config.json"], "tokenizer.json": MODEL["tokenizer.json"]}
        | dict.fromkeys(SHARDS, b"{}")
        | {"neuron_config.json": json.dumps(recorded).encode()}
    )
    text = "hosts: {instance: inf2.48xlarge}\nmodels:\n  a: {source: org/divided, engine: nxd-inference, %s}\n"
    file = examine(text % fields, "f.yaml", ".", LAPTOP)
    assert [problem.id for problem in file.problems] == expected
    if "tp_degree: 2" in fields:
        assert "tp_degree: needs 2, found 4" in file.problems[0].what
    if expected and expected[0] != "checkpoint-unreadable":
        assert "org/divided" in file.problems[0].what
        assert file.problems[0].where == "f.yaml:3:7"
    assert [request.path for request in hub.asked if "safetensors" in request.path] == []


@pytest.mark.parametrize(
    ("config", "trusts", "expected"),
    [
        ({"model_type": "own"}, False, [("unknown-family", "error")]),
        ({"model_type": "own", "auto_map": {"AutoModel": "m.Own"}}, False, [("remote-code-refused", "error")]),
        ({"model_type": "own", "auto_map": {"AutoModel": "m.Own"}}, True, [("checkpoint-unreadable", "warning")]),
        ({"auto_map": {"AutoModel": "m.Own"}}, False, []),  # a known family: its own class is taken
    ],
)
def test_code_of_a_checkpoint_is_rejected_unless_it_is_trusted(
    tmp_path: Path, config: Mapping[str, Any], trusts: bool, expected: list[tuple[str, str]]
) -> None:
    """Only if transformers has no class; and planning never runs it."""
    known = json.loads(MODEL["config.json"])
    stub_checkpoint(tmp_path, {**known, **config})
    (tmp_path / "m.py").write_text("raise SystemExit('it runs')")
    assert problems(read(f"a: {{source: {tmp_path}, trust_remote_code: {str(trusts).lower()}}}")) == expected


PHI = {"model_type": "phi3", "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}}


@pytest.mark.parametrize("family", ["phi3", "deepseek_v3", "falcon"])
@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ("vllm", [("checkpoint-unreadable", "warning")]),
        ("cpu", [("unknown-family", "error")]),
        ("nxd-inference", [("unknown-family", "error"), ("engine-needs-neuron", "warning")]),
    ],
)
def test_code_is_not_asked_for_where_the_library_has_a_class(
    tmp_path: Path, engine: str, expected: list[tuple[str, str]], family: str
) -> None:
    """The result is the same as without `auto_map`, and no hint pushes towards running the checkpoint's code."""
    stub_checkpoint(tmp_path, {**json.loads(MODEL["config.json"]), **PHI, "model_type": family})

    found = read(f"a: {{source: {tmp_path}, engine: {engine}}}")

    assert problems(found) == expected
    assert "trust_remote_code" not in found.problems[0].hint


def test_the_library_is_that_of_the_engines_python(tmp_path: Path) -> None:
    """A Python of vLLM with an older transformers, which has no phi3."""
    tables = tmp_path / "venv" / "lib" / "python3.10" / "site-packages" / "transformers" / "models" / "auto"
    tables.mkdir(parents=True)
    (tables / "configuration_auto.py").write_text('CONFIG_MAPPING_NAMES = OrderedDict([("gpt2", "GPT2Config")])\n')
    stub_checkpoint(tmp_path / "phi", {**json.loads(MODEL["config.json"]), **PHI})
    spec = f"engines: {{vllm: {{python: {tmp_path}/venv/bin/python}}}}\n"
    spec += f"models: {{a: {{source: {tmp_path}/phi, engine: vllm}}}}\n"

    found = examine(f"hosts: {{emulate: inf2.48xlarge}}\n{spec}", "f.yaml", ".", LAPTOP)

    assert [problem.id for problem in found.problems] == ["remote-code-refused"]


OWN_TOKENIZER = {"tokenizer_class": "MyTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_my.MyTokenizer", None]}}


@pytest.mark.parametrize(
    ("engine", "name", "expected"),
    [
        ("cpu", "tokenizer.json", []),
        ("cpu", "vocab.json", [("tokenizer-needs-code", "error")]),
        ("echo", "vocab.json", []),  # it has no tokenizer
        ("vllm, max_len: 64", "tokenizer.json", [("tokenizer-needs-code", "error")]),  # vLLM loads it itself
        ("vllm, max_len: 64, trust_remote_code: true", "tokenizer.json", []),
        ("vllm, max_len: 64, trust_remote_code: true", "vocab.json", [("tokenizer-needs-code", "error")]),
    ],
)
@pytest.mark.parametrize("place", ["hub", "folder"])
def test_a_tokenizer_that_is_only_code_is_refused_before_anything_is_fetched(
    hub: HubServer, tmp_path: Path, place: str, engine: str, name: str, expected: list[tuple[str, str]]
) -> None:
    """The small files are checked, in a folder and on the hub."""
    files = {**MODEL, "tokenizer_config.json": json.dumps(OWN_TOKENIZER).encode()}
    files[name] = files.pop("tokenizer.json")
    hub.repos["org/own"] = Repo()
    hub.repos["org/own"].commit(files)
    for file, data in files.items():
        (tmp_path / file).write_bytes(data)
    source = "org/own" if place == "hub" else tmp_path

    found = read(f"a: {{source: {source}, engine: {engine}}}")

    assert problems(found) == expected
    assert all(str(source) in problem.what for problem in found.problems)
    assert [request.path for request in hub.asked if "safetensors" in request.path] == []


def test_a_source_without_a_tokenizer_is_refused_before_it_is_fetched(hub: HubServer) -> None:
    """Its requests could not be served."""
    hub.repos["org/bare"] = Repo()
    hub.repos["org/bare"].commit({name: data for name, data in MODEL.items() if name != "tokenizer.json"})
    assert problems(read("a: {source: org/bare, engine: cpu}")) == [("no-tokenizer", "error")]


QUANTIZED = {**json.loads(MODEL["config.json"]), "quantization_config": {"quant_method": "fbgemm_fp8"}}


@pytest.mark.parametrize(("compiled", "expected"), [(False, ["weights-quantized"]), (True, [])])
def test_quantized_weights_are_refused_unless_they_are_compiled_already(
    tmp_path: Path, compiled: bool, expected: list[str]
) -> None:
    """A folder that NxD Inference compiled holds weights of its own, which its neuron_config.json describes."""
    stub_checkpoint(tmp_path, QUANTIZED)
    if compiled:
        (tmp_path / "neuron_config.json").write_text("{}")
        (tmp_path / "model.pt").touch()
    model = f"a: {{source: {tmp_path}, engine: nxd-inference, tp_degree: 8, max_len: 64}}"
    found = examine(f"hosts: {{instance: trn2.48xlarge}}\nmodels: {{{model}}}\n", "f.yaml", ".", LAPTOP)
    assert [problem.id for problem in found.problems if problem.id == "weights-quantized"] == expected


def test_vllm_may_serve_other_families(tmp_path: Path) -> None:
    """It has more than the planner, such as those that read images; a warning names the rules that are skipped."""
    nested = {key: json.loads(MODEL["config.json"])[key] for key in ("vocab_size", "hidden_size")}
    stub_checkpoint(tmp_path, {"model_type": "qwen2_5_vl", "text_config": nested})

    found = read(f"a: {{source: {tmp_path}, engine: vllm}}")

    assert problems(found) == [("checkpoint-unreadable", "warning")]
    assert "'qwen2_5_vl'" in found.problems[0].what


@pytest.mark.parametrize("files", [{"config.json": '{"model_type": "own"}'}, {"model.gguf": "GGUF"}])
def test_a_server_may_load_what_no_engine_can(tmp_path: Path, files: Mapping[str, str]) -> None:
    """Its command knows the family and the files; but the folder must exist."""
    server = '{command: [serve, "{model}", --port, "{port}"], slots: 2}'
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    found = read(f"a: {{source: {tmp_path}, engine: server, server: {server}}}")
    missing = read(f"a: {{source: {tmp_path}/none, engine: server, server: {server}}}")

    assert (problems(found), problems(missing)) == ([], [("model-not-found", "error")])


def test_a_fleet_stays_at_its_first_commit(hub: HubServer) -> None:
    """Also when the branch moves, the hub is unreachable, and the controller reads its revision again; another
    fleet, or another revision in the spec, resolves it again.
    """
    first = hub.repos["org/tiny"].names["main"]
    assert commit(generation("a: {source: org/tiny}")) == first
    moved = hub.repos["org/tiny"].commit({**MODEL, "README.md": b"x", "generation_config.json": b"{}"})
    read("a: {source: org/tiny}")  # as an apply does
    hub.away()
    assert commit(generation("a: {source: org/tiny}, b: {engine: echo}", 2)) == first
    hub.back()
    assert commit(generation("a: {source: org/tiny}", 1, "f2")) == moved
    assert commit(generation(f"a: {{source: org/tiny, revision: {moved}}}", 3)) == moved


def test_a_draft_is_pinned_like_its_model(hub: HubServer) -> None:
    """By its own revision."""
    tag = hub.repos["org/tiny"].commit({**MODEL, "x.json": b"{}"}, "v1")
    resolved = generation("a: {source: org/tiny, draft: {source: org/tiny, revision: v1}}")
    (model,) = resolved.spec.models
    assert (resolved.commit(model), resolved.commit(model, DRAFT)) == (hub.repos["org/tiny"].names["main"], tag)
    assert {key: origin.source for key, origin in resolved.origins(model).items()} == {
        "source": "org/tiny",
        "draft.source": "org/tiny",
    }


def test_adapters_are_read_and_pinned_like_models(s3: S3Server, hub: HubServer, tmp_path: Path) -> None:
    """Only their configurations are fetched to plan, which decide the largest rank of a server."""
    hub.repos["org/lora"] = Repo()
    first = hub.repos["org/lora"].commit(adapter(64))
    s3.bucket("loras", {f"a/{name}": data for name, data in adapter(8).items()})
    for name, data in adapter(16).items():
        (tmp_path / name).write_bytes(data)
    model = "a: {source: %s, engine: vllm, max_len: 64, adapters: {%s}}"
    adapters = f"x: org/lora, y: s3://loras/a, z: {tmp_path}"
    resolved = generation(model % (TINY, adapters))
    hub.repos["org/lora"].commit(adapter(32))

    assert problems(read(model % (TINY, adapters))) == []
    (spec,) = resolved.spec.models
    assert {name: known.rank for name, known in resolved.adapters["a"].items()} == {"x": 64, "y": 8, "z": 16}
    assert resolved.origins(spec) == {
        "adapters.x": Origin(source="org/lora", revision=first),
        "adapters.y": Origin(source="s3://loras/a"),
    }
    assert [request.path for request in hub.asked if "safetensors" in request.path] == []
    versions = [
        generation(model % (TINY, some)).versions["a"] for some in (adapters, "y: s3://loras/a", "z: /elsewhere")
    ]
    assert versions[0] != versions[1] == versions[2]


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_incomplete_adapter_is_an_error(missing: str, s3: S3Server, tmp_path: Path) -> None:
    """In S3 or in a folder."""
    files = {name: data for name, data in adapter(8).items() if name != missing}
    s3.bucket(f"lora-{len(missing)}", {f"a/{name}": data for name, data in files.items()})
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    found = [
        problems(read(f"a: {{source: {TINY}, engine: vllm, max_len: 64, adapters: {{x: {place}}}}}"))
        for place in (f"s3://lora-{len(missing)}/a", tmp_path)
    ]
    assert found == [[("layout-unknown", "error")], [("adapter-unusable", "error")]]


def adapter(rank: int) -> dict[str, bytes]:
    config = {"r": rank, "peft_type": "LORA", "target_modules": ["q_proj"]}
    return {"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": b"weights"}


def test_the_gateway_reads_the_tokenizer_of_a_remote_model(s3: S3Server, hub: HubServer) -> None:
    """From the small files; it equals that of a folder with the same files."""
    resolved = generation(f"a: {{source: org/tiny}}, b: {{source: s3://models/tiny}}, c: {{source: {TINY}}}")
    folders = [resolved.folder(model) for model in resolved.spec.models]
    assert folders[2] == str(TINY)
    for folder in folders:
        assert (Path(folder or "") / "tokenizer.json").read_bytes() == MODEL["tokenizer.json"]
    assert len(set(resolved.tokenizers.values())) == 1


def test_the_daemon_requests_only_unknown_metadata(hub: HubServer) -> None:
    """An apply has requested it; reading its revision sends no request."""
    read("a: {source: org/tiny}")
    before = len(hub.asked)
    generation("a: {source: org/tiny}")
    assert len(hub.asked) == before


def test_without_metadata_a_generation_exists_all_the_same(hub: HubServer) -> None:
    """The controller reports the failed fetch; reading must not raise."""
    hub.away()
    resolved = generation("a: {source: org/tiny, revision: v1}")
    (model,) = resolved.spec.models
    assert resolved.origins(model) == {"source": Origin(source="org/tiny", revision="v1")}
    assert resolved.folder(model) is None


@pytest.mark.parametrize("command", ["validate", "plan"])
def test_commands_accept_specs_with_remote_models(
    s3: S3Server, hub: HubServer, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    """And no credential is in their output or files."""
    file = tmp_path / "spec.yaml"
    file.write_text(f"{HOSTS}models: {{a: {{source: s3://models/tiny}}, b: {{source: s3://models/none}}}}\n")
    assert cli.run([command, str(file)]) in (0, 2)
    shown = capsys.readouterr()
    kept = b"".join(path.read_bytes() for path in home.rglob("*") if path.is_file())
    for secret in (ACCESS_KEY, SECRET_KEY, SESSION_TOKEN, "X-Amz-Signature"):
        assert secret not in shown.out + shown.err
        assert secret.encode() not in kept
    assert "s3-not-found" in shown.err or "no objects below s3://models/none/" in shown.err


def test_a_disallowed_source_gets_no_request(hub: HubServer) -> None:
    """The allowed sources are checked first."""
    from orchestrator.access.source_policy import SourcePolicy

    text = f"{HOSTS}models: {{a: {{source: org/tiny}}}}\n"
    file = examine(text, "f.yaml", ".", LAPTOP, SourcePolicy(("/models",)))
    assert problems(file) == [("source-not-allowed", "error")]
    assert hub.asked == []


def test_no_test_uses_the_network() -> None:
    """As ensured by conftest.py."""
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert problems(read("a: {source: openai-community/gpt2}")) == [("checkpoint-unreadable", "warning")]


@pytest.mark.slow
def test_generate_answers_with_a_model_in_s3(s3: S3Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It fetches the model into the store first; the answer is that of the folder's model."""
    said = []
    for source in (str(TINY), "s3://models/tiny"):
        file = tmp_path / "spec.yaml"
        file.write_text(f"{HOSTS}models: {{a: {{source: {source}, engine: cpu, max_len: 64}}}}\n")
        assert cli.run(["generate", str(file), "a", "--prompt", "A slot is", "--max-tokens", "8"]) == 0
        shown = capfd.readouterr()
        said.append(shown.out)
    assert said[0] == said[1] != ""
    assert "fetching s3://models/tiny" in shown.err
