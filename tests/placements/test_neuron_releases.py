"""The table of Neuron SDK releases: its shape, and what is derived from it."""

from __future__ import annotations

import re
from dataclasses import asdict
from datetime import date
from itertools import pairwise

import pytest

from placements.engines.registry import CHOICES, ENGINES, Engine, sdks_with
from placements.engines.vllm.capabilities import RELEASES
from placements.facts.neuron_releases import (
    ENVIRONMENTS,
    SDKS,
    environments_on,
    next_series,
    sdk_named,
    sdk_of,
)
from placements.facts.versions import order, series

VERSION = r"\d+(\.\d+)+"
TAG = r"\d+(\.\d+)+-neuronx-py3\d+-sdk\d+\.\d+\.\d+-ubuntu2[246]\.04"
SDK_FORMATS = {
    "sdk": r"2\.\d\d\.\d",
    "released": r"20\d\d-\d\d-\d\d",
    "neuronx_cc": rf"({VERSION})?",
    "torch_neuronx": rf"({VERSION})?",
    "nxd_inference": rf"({VERSION})?",
    "transformers_neuronx": r"(0\.13\.\d+)?",
    "transformers": r"(4\.\d+)?",
    "container": f"({TAG})?",
    "vllm_container": f"({TAG})?",
}
ENVIRONMENT_FORMATS = {
    "first": r"2\.\d\d\.\d",
    "last": r"2\.\d\d\.\d",
    "os": r"Ubuntu 2[24]\.04|Amazon Linux 2023",
    "path": r"/opt/aws_neuronx_venv_pytorch_[a-z0-9_]+",
    "python": r"(3\.\d+)?",
    "torch": r"(2\.\d+)?",
    "vllm": r"(0\.\d+\.0)?",
    "support_ended": r"(20\d\d-\d\d-\d\d)?",
}
SOURCE = re.compile(r"\b(sdk (v2\.\d\d\.\d|[0-9a-f]{7})|docs v2\.\d\d\.0)\b")


def test_every_row_has_a_source_and_values_of_the_expected_form() -> None:
    """A value that was not found is empty."""
    for table, formats in ((SDKS, SDK_FORMATS), (ENVIRONMENTS, ENVIRONMENT_FORMATS)):
        for row in table:
            wrong = {name for name, form in formats.items() if not re.fullmatch(form, asdict(row)[name])}
            assert not wrong, row
            assert SOURCE.search(row.source), row
    assert {environment.engine for environment in ENVIRONMENTS} <= set(CHOICES)


def test_releases_are_in_the_order_of_versions_and_of_dates() -> None:
    """Each once; the versions of their packages do not decrease either."""
    for before, after in pairwise(SDKS):
        assert order(before.sdk) < order(after.sdk)
        assert date.fromisoformat(before.released) < date.fromisoformat(after.released)
        for name in ("neuronx_cc", "nxd_inference", "transformers_neuronx"):
            older, newer = getattr(before, name), getattr(after, name)
            assert not (older and newer) or order(older) <= order(newer), (after.sdk, name)


def test_containers_are_of_their_release() -> None:
    """By the release in the tag."""
    for sdk in SDKS:
        for tag in filter(None, (sdk.container, sdk.vllm_container)):
            assert f"-sdk{sdk.sdk}-" in tag


def test_environments_belong_to_releases_of_the_table() -> None:
    """From the first to the last, without two of an engine and vLLM on one image."""
    names = [sdk.sdk for sdk in SDKS]
    for environment in ENVIRONMENTS:
        assert names.index(environment.first) <= names.index(environment.last)
    for sdk in SDKS:
        keys = [(item.os, item.engine, item.vllm) for item in environments_on(sdk)]
        assert len(keys) == len(set(keys)), sdk.sdk


def test_the_path_of_an_environment_has_the_versions_of_its_row() -> None:
    """PyTorch's, or vLLM's if the path has a version."""
    for environment in ENVIRONMENTS:
        if environment.engine == "vllm":
            versions = re.search(r"vllm_(\d+_\d+)", environment.path)
            assert versions is None or series(environment.vllm) == versions[1].replace("_", ".")
        else:
            assert f"_pytorch_{environment.torch.replace('.', '_')}_" in environment.path


@pytest.mark.parametrize(
    ("os", "path"),
    [
        ("Ubuntu 24.04", "/opt/aws_neuronx_venv_pytorch_2_9_nxd_inference"),
        ("Ubuntu 22.04", "/opt/aws_neuronx_venv_pytorch_2_8_nxd_inference"),
    ],
)
def test_the_environment_depends_on_the_operating_system(os: str, path: str) -> None:
    """SDK 2.28 has PyTorch 2.9 on Ubuntu 24.04 only."""
    sdk = sdk_named("2.28")
    assert sdk is not None
    assert [item.path for item in environments_on(sdk) if item.os == os and item.engine == "nxd-inference"] == [path]


@pytest.mark.parametrize(
    ("engine", "machines", "span"),
    [
        ("nxd-inference", "inf2", ("2.24", "2.28")),
        ("nxd-inference", "trn2", ("2.24", "2.31")),
        ("vllm", "trn1", ("2.27", "2.28")),
        ("vllm", "trn2", ("2.27", "2.32")),
        ("transformers-neuronx", "inf2", ("2.21", "2.25")),
        ("transformers-neuronx", "trn2", None),
    ],
)
def test_images_have_an_engine_for_a_span_of_releases(
    engine: Engine, machines: str, span: tuple[str, str] | None
) -> None:
    """By the limits of the engines on these machines."""
    found = [sdk.series for sdk in sdks_with(engine, machines)]
    assert (found[0], found[-1]) == span if span else found == []


def test_the_table_agrees_with_the_facts_about_engines() -> None:
    """On the last NxD Inference for inf2, and the SDK of each release of vLLM's plugin."""
    assert series(sdks_with("nxd-inference", "inf2")[-1].nxd_inference) == ENGINES["nxd-inference"].newest("inf2")
    for release in RELEASES:
        last = release.sdk.split(" to ")[-1]
        sdks = [sdk for sdk in SDKS if sdk.series == last]
        paired = {item.vllm for sdk in sdks for item in environments_on(sdk)} | {sdk.vllm_container for sdk in sdks}
        assert release.vllm in map(series, paired), release


@pytest.mark.parametrize(
    ("engine", "version", "machines", "reason"),
    [
        ("nxd-inference", "0.8.16251", "inf2", None),
        ("nxd-inference", "0.10.18399", "inf2", None),  # in maintenance
        ("nxd-inference", "0.3.5591", "trn2", "0.3.5591 is too old: 0.4 and later are supported"),
        ("vllm", "0.16.0", "trn1", None),  # in maintenance, too
        ("vllm", "0.21.0", "trn1", "0.21.0 does not run on trn1"),
        ("vllm", "0.24.0", "trn2", None),
        ("vllm", "0.33.0", "trn3", None),  # newer than all that are known
        ("vllm", "0.33.0", "inf2", "0.33.0 does not run on inf2"),
        ("vllm", "0.9.1", "inf2", "0.9.1 is of no supported release of vllm-neuron"),
        ("torch-neuronx", "2.9.0.2.12.22436", "inf2", None),
    ],
)
def test_a_version_that_does_not_work_is_refused_with_the_reason(
    engine: Engine, version: str, machines: str, reason: str | None
) -> None:
    assert ENGINES[engine].unsupported(version, machines) == reason


@pytest.mark.parametrize(
    ("packages", "sdk"),
    [
        ({"neuronx-cc": "2.23.6484.0+3b612583"}, "2.28"),
        ({"neuronx-cc": "2.20.9961.0+0acef03a", "transformers-neuronx": "0.13.1216"}, "2.25"),
        ({"neuronx-distributed-inference": "0.8.16251+f3ca5575"}, "2.28"),
        ({"neuronx-distributed-inference": "0.8.0"}, None),
        ({"torch": "2.9.0"}, None),
    ],
)
def test_a_release_is_recognized_by_installed_packages(packages: dict[str, str], sdk: str | None) -> None:
    """By the compiler, else by NxD Inference."""
    assert sdk_of(packages) == sdk


def test_a_series_names_its_last_release() -> None:
    """And the series after it begins with its first."""
    sdk = sdk_named("2.28")
    assert sdk is not None
    assert sdk.sdk == "2.28.1"
    assert (later := next_series(sdk)) is not None
    assert later.sdk == "2.29.0"
    assert sdk_named("9.9") is None
    assert next_series(SDKS[-1]) is None


def test_images_get_no_updates_from_the_next_release_on() -> None:
    """The newest image has no such day. Support of an engine, Python or operating system can end earlier or later."""
    by_name = {sdk.sdk: sdk for sdk in SDKS}
    assert by_name["2.28.1"].superseded == by_name["2.29.0"].released
    assert SDKS[-1].superseded == ""
    ended = {item.engine: item.support_ended for item in ENVIRONMENTS if item.os == "Ubuntu 22.04"}
    assert ended == {"transformers-neuronx": "2025-09-18", "nxd-inference": "2026-05-21"}


@pytest.mark.parametrize(
    ("engine", "version", "machines", "maintained"),
    [
        ("nxd-inference", "0.8.16251", "inf2", False),
        ("nxd-inference", "0.9.17334", "trn1", True),
        ("nxd-inference", "0.10.18399", "inf2", True),
        ("nxd-inference", "0.10.1", "trn2", False),
        ("vllm", "0.13.0", "inf2", False),
        ("vllm", "0.16.0", "inf2", True),
        ("vllm", "0.21.0", "inf2", False),  # does not run
        ("vllm", "0.16.0", "trn2", False),
    ],
)
def test_nxd_inference_is_in_maintenance_on_older_machines(
    engine: Engine, version: str, machines: str, maintained: bool
) -> None:
    """On these machines it gets critical fixes only, also below vLLM."""
    assert bool(ENGINES[engine].maintenance(version, machines)) == maintained


@pytest.mark.parametrize(
    ("engine", "version", "last"),
    [
        ("nxd-inference", "0.9.17334", ""),
        ("nxd-inference", "0.10.1", "0.9"),
        ("optimum-neuron", "0.4.5", ""),
        ("optimum-neuron", "0.5.0", "0.4"),
        ("cpu", "9.9", ""),
    ],
)
def test_a_version_that_is_newer_than_the_known_ones_is_planned_as_the_last_of_them(
    engine: Engine, version: str, last: str
) -> None:
    """Versions are compared by their numbers: 0.10 follows 0.9."""
    assert ENGINES[engine].planned_as(version) == last


def test_a_patch_without_stated_versions_has_those_of_its_series() -> None:
    """Otherwise the newest release would have no known failures as soon as it has such a patch."""
    patch = sdk_named("2.33.1")
    assert patch is not None
    assert (patch.neuronx_cc, patch.packages) == ("", {"neuronx-cc": "2.28.7631.0"})
