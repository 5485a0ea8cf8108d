"""The flags of `vllm serve` that engine_options may set."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from placements.engines.server.capabilities import container_in
from placements.engines.vllm.capabilities import RELEASES, release_for
from placements.engines.vllm.flags import CONFIGS, FIELDS, FLAGS, OWN, REFUSED, VERSIONS, check_flags
from placements.spec.schema import ModelSpec
from tests import vllm_flags
from tests.option_tables import NXD
from tests.placements.test_options import TABLES

PYTHON = os.environ.get("COREWRIGHT_VLLM_PYTHON")


def said(options: dict[str, Any], version: str = "") -> list[tuple[str, str]]:
    """The ids and hints of the findings."""
    return [(finding.id, finding.hint) for finding in check_flags(options, version, "0.4")]


def test_the_table_has_what_was_recorded() -> None:
    """``python -m tests.vllm_flags --table`` writes it anew."""
    assert vllm_flags.TABLE.read_text() == vllm_flags.text()
    assert tuple(json.loads(vllm_flags.CONTRACT.read_text())) == VERSIONS


def test_every_release_of_the_plugin_has_a_recorded_vllm() -> None:
    """So that no release is checked against the flags of another version."""
    assert {release.vllm for release in RELEASES} < set(VERSIONS)


@pytest.mark.parametrize(
    ("named", "release"),
    [
        ("0.24", ("0.24", "0.24", "2.32")),
        ("0.24.0.1.1.0", ("0.24", "0.24", "2.32")),
        ("0.33", ("0.33", "0.29", "2.33")),
        ("0.6", ("0.6", "0.16", "2.29 to 2.31")),
        ("0.3", ("0.3", "0.11", "2.27")),
    ],
)
def test_an_unknown_release_is_planned_as_the_last_known_one_before_it(
    named: str, release: tuple[str, str, str]
) -> None:
    """It keeps its own name, with which an interpreter is compared."""
    assert tuple(release_for("trn2", named)) == release


def test_flags_that_cannot_be_set_exist_and_have_one_reason() -> None:
    """A flag has a field or a reason; fields are those of a model, or of engine_options."""
    assert FIELDS.keys() | REFUSED.keys() <= FLAGS.keys()
    assert not FIELDS.keys() & REFUSED.keys()
    assert {field.partition(".")[0] for field in FIELDS.values()} <= ModelSpec.model_fields.keys()
    assert {field.partition(".")[2] for field in FIELDS.values() if field.startswith("engine_options.")} <= OWN.keys()


def test_fields_inside_the_override_are_options_of_nxd_inference() -> None:
    """By the recorded table of its NeuronConfig."""
    assert CONFIGS["override_neuron_config"].keys() - {"quantization_dtype"} <= TABLES[f"{NXD}.NeuronConfig"].keys()


def test_a_flag_is_checked_against_the_version() -> None:
    """Emulated hosts have any version."""
    newer = {"watermark": 0.1}
    assert said(newer) == []
    assert said(newer, "0.24") == []
    assert said(newer, "0.13") == [("unknown-engine-option", "remove it")]


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("max-logprobs", 1, "max_logprobs"),
        ("no_async_scheduling", True, "async_scheduling"),
        ("enforce_eagr", True, "enforce_eager"),
        ("max_num_seq", 1, "set max_batch"),
        ("worker_clas", "x", "remove it"),
    ],
)
def test_an_unknown_flag_gets_the_nearest_names(name: str, value: object, meant: str) -> None:
    """With dashes, in the negative form, or misspelt; only names that accept the value and may be set."""
    ((id, hint),) = said({name: value})
    assert (id, meant in hint) == ("unknown-engine-option", True)


@pytest.mark.parametrize("name", ["uds", "port", "api_key", "pipeline_parallel_size", "worker_cls", "config"])
def test_a_refused_flag_has_no_replacement(name: str) -> None:
    """Not even with its default."""
    assert said({name: None}) == [("unknown-engine-option", "remove it")]


@pytest.mark.parametrize(
    "options",
    [
        {"compilation_config": {"inductor_passes": {"p": "module.name"}}},
        {"logging_config": {"log_stream": "ext://module.name"}},
        {"log_config_file": "/models/log.json"},  # its handlers name any factory
        {"structured_outputs_config": {"backend": "xgrammar", "reasoning_parser_plugin": "/models/code.py"}},
    ],
)
def test_a_flag_cannot_name_code(options: dict[str, Any]) -> None:
    """vLLM would import it."""
    assert said(options) == [("unknown-engine-option", "remove it")]


def test_a_flag_that_is_true_or_absent_takes_no_false() -> None:
    """It has no form with ``--no-``."""
    assert said({"aggregate_engine_logging": True}) == []
    assert said({"aggregate_engine_logging": False}) == [("wrong-type", "")]


@pytest.mark.vllm
@pytest.mark.skipif(PYTHON is None, reason="set COREWRIGHT_VLLM_PYTHON, or use make test VLLM=1")
def test_the_newest_recorded_flags_are_those_of_the_installed_vllm() -> None:
    """Recorded anew, in its interpreter."""
    assert PYTHON is not None
    env = {"HOME": os.environ["HOME"], "PATH": os.environ["PATH"], "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    output = subprocess.run([PYTHON, vllm_flags.__file__], env=env, capture_output=True, text=True, check=True).stdout

    assert json.loads(output[output.index("{") :]) == json.loads(vllm_flags.CONTRACT.read_text())[VERSIONS[-1]]


@pytest.mark.parametrize(
    ("command", "place"),
    [
        (["docker", "run", "image"], 0),
        (["sudo", "/usr/bin/podman", "run"], 1),
        (["sh", "-c", "exec nerdctl run image"], 2),
        (["public.ecr.aws/neuron/pytorch-inference-vllm-neuronx:0.13.0", "serve"], 0),
        (["vllm/vllm-openai:latest"], 0),
        (["llama-server", "-m", "/models/docker", "--port", "8080"], None),
        (["./bin/vllm", "serve"], None),
        (["numactl", "--cpunodebind=0", "vllm", "serve"], None),
    ],
)
def test_containers_are_recognized(command: list[str], place: int | None) -> None:
    """By their command, also behind another program, or as an image."""
    assert container_in(command) == place
