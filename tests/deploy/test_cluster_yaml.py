"""The cluster launcher file, judged by Ray's own schema and parser, and by the planner's table."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from orchestrator.cluster.ray_names import INSTANCE_LABEL, core_resources
from placements.facts.topology import TOPOLOGIES
from tests.deploy.ray_start import ROOT, check_health, check_ports, command

FILE = ROOT / "cluster.yaml"
EC2 = ROOT / "deploy" / "ec2"


@pytest.fixture
def config() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return loaded


def started(config: dict[str, Any], kind: str) -> tuple[str, dict[str, str], dict[str, Any]]:
    """The text of the command that starts Ray, its variables and its options."""
    text = config[f"{kind}_start_ray_commands"][-1]
    return text, *command(text.replace("$RAY_HEAD_IP", "10.0.0.10"))


def test_ray_accepts_the_file(config: dict[str, Any]) -> None:
    """Ray's schema finds nothing wrong with it, and finds a key that it does not know."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(config))
    with pytest.raises(Exception, match="no_such_key"):
        validate_config(prepare_config(config | {"no_such_key": 1}))


def test_each_worker_declares_the_cores_of_its_instance_type(config: dict[str, Any]) -> None:
    """Every NeuronCore is a resource of its own, exactly as many as the machine has."""
    worker = config["available_node_types"]["inf2-48xlarge"]
    topology = TOPOLOGIES[worker["node_config"]["InstanceType"]]

    assert worker["resources"] == {"CPU": topology.vcpus, **core_resources(topology.cores)}
    assert worker["labels"] == {INSTANCE_LABEL: topology.instance}


def test_the_head_takes_no_work(config: dict[str, Any]) -> None:
    """Nothing is scheduled onto the head by its CPUs."""
    assert config["available_node_types"][config["head_node_type"]]["resources"] == {"CPU": 0}


@pytest.mark.parametrize("kind", ["head", "worker"])
def test_every_node_starts_with_the_token_fixed_ports_and_many_files(config: dict[str, Any], kind: str) -> None:
    """`ray start --address` does not turn the token on by itself, and Ray's default limit of files is the shell's."""
    text, variables, params = started(config, kind)

    assert variables["RAY_AUTH_MODE"] == "token"
    assert config["file_mounts"]["/home/ubuntu/.ray/auth_token"] == "~/.ray/auth_token"
    assert text.startswith("ulimit -n 65536;")
    check_ports(params)


def test_the_head_survives_a_restart_and_finds_lost_hosts(config: dict[str, Any]) -> None:
    """A store on its disk, health checks, and the autoscaler that honours labels."""
    _, variables, params = started(config, "head")

    assert (params["head"], params["port"]) == (True, 6379)
    assert (variables["RAY_gcs_storage"], variables["RAY_enable_autoscaler_v2"]) == ("rocksdb", "1")
    assert f"mkdir -p {variables['RAY_gcs_storage_path'].replace('$HOME', '~')}" in config["head_start_ray_commands"]
    check_health(params)


def test_a_worker_keeps_its_replicas_while_the_head_is_away(config: dict[str, Any]) -> None:
    """For ten minutes; and Ray cannot misread a range of cores that a shell has set."""
    text, variables, params = started(config, "worker")

    assert params["address"] == "10.0.0.10:6379"
    assert variables["RAY_gcs_rpc_server_reconnect_timeout_s"] == "600"
    assert "unset NEURON_RT_VISIBLE_CORES NEURON_RT_NUM_CORES;" in text


def test_the_head_may_pass_the_role_that_workers_have(config: dict[str, Any]) -> None:
    """Without iam:PassRole no worker with an instance profile can be launched."""
    types = config["available_node_types"]
    head, worker = (
        types[kind]["node_config"]["IamInstanceProfile"]["Arn"].rpartition("/")[2] for kind in ("head", "inf2-48xlarge")
    )
    statements = {
        item["Action"]: item["Resource"] for item in json.loads((EC2 / "head-policy.json").read_text())["Statement"]
    }

    assert (head, worker) == ("corewright-head", "corewright-worker")
    assert statements["iam:PassRole"].endswith(f":role/{worker}")


def test_a_worker_may_read_models_and_push_to_the_neff_cache_of_the_guides() -> None:
    """Otherwise each new worker compiles for an hour."""
    statements = json.loads((EC2 / "worker-policy.json").read_text())["Statement"]
    specs = [(ROOT / file).read_text() for file in ("docs/deploy-ec2.md", "deploy/kuberay/fleet.yaml")]

    *reads, pushes = [(item["Action"], item["Resource"]) for item in statements]

    assert [action for action, _ in reads] == ["s3:ListBucket", "s3:GetObject"]
    for text in specs:
        assert re.findall(r"neff_cache: (s3://[\w/]+)", text) == ["s3://models/compiled"]
    assert pushes == (["s3:PutObject", "s3:AbortMultipartUpload"], "arn:aws:s3:::models/compiled/*")


@pytest.mark.parametrize("file", ["cluster.yaml", "deploy/kuberay/Dockerfile", "docs/deploy-systemd.md"])
def test_each_machine_gets_what_structured_outputs_need(file: str) -> None:
    """Without the extra, response_format and required tool calls fail there."""
    installs = [line for line in (ROOT / file).read_text().splitlines() if "pip install" in line and ".whl" in line]
    assert [".whl[json]" in line or ".whl)[json]" in line for line in installs] == [True]
