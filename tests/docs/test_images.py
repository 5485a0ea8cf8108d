"""Environments, images and containers that the pages and the files of deploy/ name, against the table of releases."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from orchestrator.cli.bootstrap import MachineSituation, bootstrap
from placements.engines.nxd_inference.capabilities import NXD_VERSIONS
from placements.engines.registry import ENGINES, Engine, sdks_with
from placements.facts.neuron_releases import ENVIRONMENTS, SDKS, Environment, environments_on, sdk_named
from placements.facts.versions import series
from tests.docs.pages import ROOT

FILES = [
    ROOT / "README.md",
    ROOT / "cluster.yaml",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "placements" / "examples").glob("*.yaml")),
    *sorted(path for path in (ROOT / "deploy").rglob("*") if path.is_file()),
]
ON_INF2 = ROOT / "docs" / "on-inf2.md"
ONE_IMAGE = [ROOT / "cluster.yaml", ROOT / "deploy/systemd/corewright.service", ROOT / "docs/deploy-systemd.md"]


def words(path: Path) -> str:
    """The text of a file in one line, without the marks of comments."""
    return " ".join(re.sub(r"^\s*#+ ?", "", line) for line in path.read_text().splitlines())


def paths_in(path: Path) -> set[str]:
    return set(re.findall(r"/opt/aws_neuronx_venv_\w+", path.read_text()))


def ending(engine: Engine, machines: str) -> Environment:
    """The environment of the last image with an engine."""
    return next(item for item in environments_on(sdks_with(engine, machines)[-1]) if item.engine == engine)


def test_every_environment_exists_on_an_image() -> None:
    """In all files, which name some."""
    known = {environment.path for environment in ENVIRONMENTS}
    named = {(path.name, name) for path in FILES for name in paths_in(path)}
    assert len(named) > 5
    assert [(file, name) for file, name in named if name not in known] == []


def test_every_container_is_of_the_table() -> None:
    """With its tag."""
    known = {environment.container_in(sdk) for environment in ENVIRONMENTS for sdk in SDKS}
    named = {name for path in FILES for name in re.findall(r"public\.ecr\.aws/neuron/[\w.:-]+", path.read_text())}
    assert named
    assert named <= known


@pytest.mark.parametrize("path", ONE_IMAGE, ids=lambda path: path.name)
def test_a_file_names_the_image_whose_environment_it_uses(path: Path) -> None:
    """The release, the operating system and the environment belong together."""
    text = words(path)
    (release,) = set(re.findall(r"Neuron SDK (\d\.\d\d)", text))
    (os,) = set(re.findall(r"Deep Learning AMI Neuron \(([^)]+)\)", text))
    sdk = sdk_named(release)
    assert sdk is not None
    on_it = {item.path for item in environments_on(sdk) if item.os == os}
    assert paths_in(path)
    assert paths_in(path) <= on_it


def test_a_head_without_the_image_gets_the_python_of_the_image() -> None:
    """In the minor version that Ray requires on all nodes."""
    text = (ROOT / "docs" / "deploy-systemd.md").read_text()
    (python,) = re.findall(r"^python([\d.]+) -m venv", text, re.MULTILINE)
    assert python == ending("nxd-inference", "inf2").python


def test_nothing_follows_the_latest_image() -> None:
    """AWS's parameters of the newest image move on to releases without an engine."""
    assert [path.name for path in FILES if "latest/image_id" in path.read_text()] == []


def test_the_table_of_the_page_is_that_of_the_releases() -> None:
    """Each engine with its releases for inf2, its last image and its Python there."""
    for engine in ("nxd-inference", "vllm", "transformers-neuronx"):
        releases, last = sdks_with(engine, "inf2"), ending(engine, "inf2")
        span = f"{releases[0].series} to {releases[-1].series}"
        assert f"| `{engine}` | {span} | {last.image} | `{last.path}/bin/python` |\n" in ON_INF2.read_text()
        assert sdks_with(engine, "trn1") == releases


def test_pages_and_hints_name_the_last_release_with_an_engine() -> None:
    """Where a user without the engine reads it."""
    last = {engine: sdks_with(engine, "inf2")[-1].series for engine in ("nxd-inference", "transformers-neuronx")}
    assert f"Neuron SDK {last['transformers-neuronx']} and before" in ENGINES["transformers-neuronx"].install
    assert f"runs on Neuron SDK {last['transformers-neuronx']} at most" in words(ROOT / "docs" / "from-vllm-and-lmi.md")
    assert f"up to SDK {last['nxd-inference']};" in ENGINES["nxd-inference"].install


def test_the_page_of_engines_pairs_releases_as_the_table_does() -> None:
    """NxD Inference and the SDK, in the list of sources that the tests ran over."""
    pairs = re.findall(r"^\| (0\.\d) \| (2\.\d\d) \|", (ROOT / "docs" / "engines.md").read_text(), re.MULTILINE)
    assert [nxd for nxd, _ in pairs] == list(NXD_VERSIONS)
    assert set(pairs) <= {(series(sdk.nxd_inference), sdk.series) for sdk in SDKS}


def test_the_commands_of_the_page_are_those_of_bootstrap() -> None:
    """Each line of its first three steps, and the dates of the next releases."""
    lines = [line.strip() for line in ON_INF2.read_text().splitlines()]
    steps = bootstrap(MachineSituation("0.1.0", None)).steps
    for command in (command for step in steps[:3] for command in step.commands):
        assert command.strip() in lines
    for engine in ("nxd-inference", "transformers-neuronx"):
        index = SDKS.index(sdks_with(engine, "inf2")[-1])
        assert f"{SDKS[index + 1].sdk} of {SDKS[index + 1].released}" in words(ON_INF2)
