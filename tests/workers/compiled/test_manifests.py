"""Compiled artifacts are taken only where all is the same that they depend on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.doubles import Neuron, neuron  # noqa: F401 - the fixture
from tests.workers.nxdi_traffic import replica_config
from workers.compiled import neuron_target
from workers.compiled.host_sets import entry
from workers.compiled.neuron_target import NeuronTarget
from workers.engines.nxd_inference import artifacts as nxd_artifacts
from workers.engines.nxd_inference.config import NxdSettings
from workers.engines.nxd_inference.package import Package
from workers.engines.transformers_neuronx import artifacts as tnx_artifacts
from workers.host import host_facts

Checkpoints = Callable[[str], Path]
Make = Callable[[], Mapping[str, Any]]
TNX = ("transformers-neuronx", "neuronx-cc", "torch-neuronx", "libneuronxla", "torch", "transformers")
NXD = ("neuronx-distributed", "neuronx-cc", "torch-neuronx", "libneuronxla", "torch", "transformers")
VARIABLES = {
    "NEURON_CC_FLAGS": "-O1",
    "NEURON_LOGICAL_NC_CONFIG": "2",
    "NEURON_RT_VIRTUAL_CORE_SIZE": "2",
    "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2",
    "XLA_HANDLE_SPECIAL_SCALAR": "1",
    "UNSAFE_FP8FNCAST": "1",
}


@pytest.fixture(autouse=True)
def inf2(neuron: Neuron, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """An inf2.48xlarge on which nothing is set."""
    monkeypatch.setattr(host_facts, "instance_type", lambda: "inf2.48xlarge")
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def source(checkpoint: Checkpoints, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))


@pytest.fixture
def tnx(source: Path) -> Make:
    return lambda: tnx_artifacts.manifest(source, {"n_positions": [64]}, [4])


@pytest.fixture
def nxd(source: Path, tmp_path: Path) -> Callable[..., Mapping[str, Any]]:
    def make(**fields: Any) -> Mapping[str, Any]:
        settings = NxdSettings.of(replica_config(source, tmp_path / "compiled", **fields))
        return nxd_artifacts.unit(settings, Package("0.8.0", {}), tmp_path / "compiled").manifest

    return make


@pytest.fixture(params=["tnx", "nxd"])
def make(request: pytest.FixtureRequest) -> Make:
    """The manifest of one model on either engine, of what is true at the call."""
    make_manifest: Make = request.getfixturevalue(request.param)
    return make_manifest


def is_another(first: Mapping[str, Any], second: Mapping[str, Any], root: Path) -> bool:
    """Returns whether the second finds nothing where the first has finished."""
    with entry(root, first) as artifacts:
        artifacts.finish()
    with entry(root, first) as again:
        assert again.complete
    with entry(root, second) as artifacts:
        return not artifacts.complete


def versions(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All packages are installed, and ``change`` in another version."""
    installed = metadata.version

    def version(name: str) -> str:
        if name == change:
            return "99.9"
        try:
            return installed(name)
        except metadata.PackageNotFoundError:
            return "1.0"

    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.parametrize("variable", VARIABLES)
def test_each_variable_that_the_compiler_reads_makes_other_artifacts(
    make: Make, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags, the target, the LNC by either name, and what 8-bit floats are compiled by."""
    before = make()
    monkeypatch.setenv(variable, VARIABLES[variable])
    assert is_another(before, make(), tmp_path / "compiled")


@pytest.mark.parametrize(
    ("engine", "package"), [*(("tnx", package) for package in TNX), *(("nxd", package) for package in NXD)]
)
def test_each_package_of_an_engine_makes_other_artifacts(
    engine: str, package: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it traces with, compiles with and loads with; the names of NEFFs depend on none of them."""
    make: Make = request.getfixturevalue(engine)
    versions("", monkeypatch)
    before = make()
    versions(package, monkeypatch)
    assert is_another(before, make(), tmp_path / "compiled")


def test_another_machine_makes_other_artifacts_only_where_its_target_differs(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inferentia 2 and Trainium 1 run the same code; Trainium 2 does not, of the same LNC either."""
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    before = make()
    differs = {}
    for instance in ("inf2.xlarge", "trn1.32xlarge", "trn1n.32xlarge", "trn2.48xlarge"):
        monkeypatch.setattr(host_facts, "instance_type", lambda instance=instance: instance)
        differs[instance] = is_another(before, make(), tmp_path / instance)
    assert differs == {
        "inf2.xlarge": False,
        "trn1.32xlarge": False,
        "trn1n.32xlarge": False,
        "trn2.48xlarge": True,
    }


def test_another_configuration_of_the_model_makes_other_artifacts(make: Make, source: Path, tmp_path: Path) -> None:
    """One number in config.json."""
    before = make()
    settings = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(settings | {"rms_norm_eps": 1e-4}))
    assert is_another(before, make(), tmp_path / "compiled")


@pytest.mark.parametrize(("options", "speculation"), [({"n_positions": [128]}, [4]), ({"n_positions": [64]}, [])])
def test_other_shapes_of_transformers_neuronx_make_other_artifacts(
    tnx: Make, source: Path, options: dict[str, Any], speculation: list[int], tmp_path: Path
) -> None:
    """Its options, and how far it speculates."""
    assert is_another(tnx(), tnx_artifacts.manifest(source, options, speculation), tmp_path / "compiled")


@pytest.mark.parametrize(
    "fields", [{"slots": 2}, {"tp_degree": 4}, {"dtype": "bf16"}, {"decode_buckets": [96]}, {"fuse_qkv": True}]
)
def test_other_shapes_of_nxd_inference_make_other_artifacts(
    nxd: Callable[..., Mapping[str, Any]], fields: dict[str, Any], tmp_path: Path
) -> None:
    """What of the spec is compiled in."""
    assert is_another(nxd(), nxd(**fields), tmp_path / "compiled")


def test_a_draft_makes_other_artifacts_of_nxd_inference(
    nxd: Callable[..., Mapping[str, Any]], source: Path, tmp_path: Path
) -> None:
    """It is compiled with the model."""
    draft = Path(shutil.copytree(source, tmp_path / "draft"))
    with_draft = nxd(draft_source=str(draft), draft_k=3)
    assert is_another(nxd(), with_draft, tmp_path / "compiled")
    weights = draft / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    assert is_another(with_draft, nxd(draft_source=str(draft), draft_k=3), tmp_path / "again")


def test_what_is_said_twice_is_the_same(tnx: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An LNC that is the machine's anyway, and its own target."""
    before = tnx()
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")
    assert not is_another(before, tnx(), tmp_path / "compiled")


@pytest.mark.parametrize(
    ("instance", "variables", "target"),
    [
        ("inf2.xlarge", {}, NeuronTarget("trn1", 1)),
        ("trn1n.32xlarge", {}, NeuronTarget("trn1", 1)),
        ("trn2.48xlarge", {}, NeuronTarget("trn2", 2)),
        ("trn2u.48xlarge", {"NEURON_LOGICAL_NC_CONFIG": "1"}, NeuronTarget("trn2", 1)),
        ("trn2.48xlarge", {"NEURON_RT_VIRTUAL_CORE_SIZE": "1"}, NeuronTarget("trn2", 1)),
        (
            "trn2.48xlarge",
            {"NEURON_LOGICAL_NC_CONFIG": "2", "NEURON_RT_VIRTUAL_CORE_SIZE": "1"},
            NeuronTarget("trn2", 2),
        ),
        ("inf2.xlarge", {"NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"}, NeuronTarget("trn2", 2)),
        ("inf9.xlarge", {}, NeuronTarget("inf9", None)),
        (None, {}, NeuronTarget(None, None)),
        (None, {"NEURON_LOGICAL_NC_CONFIG": "two"}, NeuronTarget(None, "two")),
    ],
)
def test_the_target_is_that_of_the_machine_unless_it_is_overridden(
    instance: str | None, variables: dict[str, str], target: NeuronTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the LNC in force: a variable's, else the target's own."""
    monkeypatch.setattr(host_facts, "instance_type", lambda: instance)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert neuron_target.current() == target
