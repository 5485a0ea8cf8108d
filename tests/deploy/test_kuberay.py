"""The manifests for KubeRay: by the operator's own schema where KUBERAY_CRD names it, and by Ray's parser."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from orchestrator.control.decisions.departures import END_S
from placements.facts.topology import TOPOLOGIES, Machine
from placements.planner.host_choice import plan_on_cluster
from placements.planner.spec_hosts import hosts_for
from placements.spec.parse import parse
from placements.spec.schema import Spec
from tests.deploy.ray_start import GATEWAY_PORT, ROOT, check_health, check_host, options

FOLDER = ROOT / "deploy" / "kuberay"
DOCUMENTS = list(yaml.safe_load_all((FOLDER / "raycluster.yaml").read_text()))
CLUSTER = next(document for document in DOCUMENTS if document["kind"] == "RayCluster")
GROUPS = {group["groupName"]: group for group in CLUSTER["spec"]["workerGroupSpecs"]}
HEAD = CLUSTER["spec"]["headGroupSpec"]
DEVICES = "aws.amazon.com/neuron"


def strict(node: Any) -> Any:
    """A schema of a CRD as JSON Schema, in which a field that Kubernetes would drop silently is an error."""
    if isinstance(node, dict):
        node = {key: strict(value) for key, value in node.items()}
        open_to_all = node.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in node
        if isinstance(node.get("properties"), dict) and not open_to_all:
            node["additionalProperties"] = False
        if node.get("x-kubernetes-int-or-string"):
            node.pop("type", None)
            node["anyOf"] = [{"type": "integer"}, {"type": "string"}]
        return node
    return [strict(item) for item in node] if isinstance(node, list) else node


@pytest.mark.skipif("KUBERAY_CRD" not in os.environ, reason="KUBERAY_CRD names no ray.io_rayclusters.yaml of KubeRay")
def test_the_operators_schema_accepts_the_cluster() -> None:
    """And refuses a field that it does not know."""
    crd = yaml.safe_load(Path(os.environ["KUBERAY_CRD"]).read_text())
    schema = next(version for version in crd["spec"]["versions"] if version["storage"])["schema"]["openAPIV3Schema"]
    validator = Draft202012Validator(strict(schema) | {"properties": strict(schema)["properties"] | {"metadata": {}}})

    assert [error.message for error in validator.iter_errors(CLUSTER)] == []
    wrong = CLUSTER | {"spec": CLUSTER["spec"] | {"noSuchField": 1}}
    assert len(list(validator.iter_errors(wrong))) == 1


def start_words(group: dict[str, Any]) -> list[str]:
    """The options that the operator gives `ray start`: resources and labels of the group, quoted for a shell."""
    params = dict(group["rayStartParams"])
    assert not params.keys() & {"num-cpus", "memory", "resources", "labels"}  # the operator refuses both
    names = {name: float(amount) for name, amount in group["resources"].items() if name != "CPU"}
    params |= {
        "num-cpus": group["resources"]["CPU"],
        "resources": "'{" + ",".join(f'"{name}":{amount:g}' for name, amount in names.items()) + "}'",
        "labels": ",".join(f"{key}={value}" for key, value in group["labels"].items()),
    }
    return shlex.split(" ".join(f"--{name}={value}" for name, value in params.items()))


@pytest.mark.parametrize("name", GROUPS)
def test_a_worker_has_all_devices_and_cores_of_its_node(name: str) -> None:
    """Ray reads the label and the cores of the instance type, and no other pod can have its devices."""
    group = GROUPS[name]
    pod = group["template"]["spec"]
    instance = pod["nodeSelector"]["node.kubernetes.io/instance-type"]
    resources = pod["containers"][0]["resources"]

    check_host(options(start_words(group)), instance)
    assert int(resources["limits"][DEVICES]) == TOPOLOGIES[instance].devices
    assert resources["limits"] == resources["requests"]  # no other pod's use of the CPUs slows it down
    assert resources["limits"]["cpu"] == group["resources"]["CPU"]
    assert pod["tolerations"] == [{"key": DEVICES, "operator": "Exists"}]


@pytest.mark.parametrize("name", GROUPS)
def test_a_pod_that_ends_gives_its_replicas_the_time_of_the_notice(name: str) -> None:
    """Ray accepts the command; the pod is killed only after the deadline."""
    from ray.scripts.scripts import drain_node

    pod = GROUPS[name]["template"]["spec"]
    script = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][2]
    words = shlex.split(script.replace("\\\n", " ").partition("\n")[0])
    assert words[:2] == ["ray", "drain-node"]
    seconds = drain_node.make_context("drain-node", words[2:]).params["deadline_remaining_seconds"]

    assert seconds + END_S <= pod["terminationGracePeriodSeconds"]


def test_ray_accepts_the_parameters_of_the_head() -> None:
    """With the health checks, and without CPUs for others' work."""
    params = options(shlex.split(" ".join(f"--{name}={value}" for name, value in HEAD["rayStartParams"].items())))

    assert params["num_cpus"] == 0
    check_health(params)


def ports(group: dict[str, Any]) -> dict[str, int]:
    """The ports of the container of Ray."""
    return {port["name"]: port["containerPort"] for port in group["template"]["spec"]["containers"][0]["ports"]}


def test_no_port_of_ray_is_the_gateways() -> None:
    """The operator exports metrics on 8080 unless it is given another port, under this name."""
    for group in (HEAD, *GROUPS.values()):
        assert str(ports(group)["metrics"]) == group["rayStartParams"]["metrics-export-port"] != str(GATEWAY_PORT)


def test_the_service_reaches_the_gateways() -> None:
    """In the pods that it selects, at the port that `up` has by default."""
    (service,) = [document for document in DOCUMENTS if document["kind"] == "Service"]
    (target,) = service["spec"]["ports"]
    cluster = CLUSTER["metadata"]["name"]

    assert service["spec"]["selector"] == {"ray.io/cluster": cluster, "ray.io/node-type": "worker"}
    assert {ports(group)[target["targetPort"]] for group in GROUPS.values()} == {GATEWAY_PORT}


def test_the_job_starts_the_spec_that_the_head_mounts() -> None:
    """By the head's own job interface, with the cluster's token; the command exists with these options."""
    from orchestrator.cli.main import application

    (container,) = yaml.safe_load((FOLDER / "up-job.yaml").read_text())["spec"]["template"]["spec"]["containers"]
    words = container["command"]
    up = application("up").commands["up"]
    given = up.make_context("up", words[words.index("up") + 1 :]).params
    folder, file = given["spec"].rsplit("/", 1)
    pod = HEAD["template"]["spec"]
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}

    assert words[:3] == ["ray", "job", "submit"]
    assert given["ray_address"] == "auto"
    assert {"name": mounts[folder], "configMap": {"name": "corewright-fleet"}} in pod["volumes"]
    assert (FOLDER / file).is_file()
    secret = container["env"][1]["valueFrom"]["secretKeyRef"]
    assert secret == {"name": CLUSTER["metadata"]["name"], "key": "auth_token"}


def test_the_spec_reserves_what_the_pod_does_not_get() -> None:
    """The planner counts on the CPUs and the memory of the pod, not of the node."""
    for host in fleet().hosts:
        topology = TOPOLOGIES[str(host.instance)]
        limits = group_of(str(host.instance))["template"]["spec"]["containers"][0]["resources"]["limits"]

        assert topology.vcpus - (host.reserve.vcpus or 0) == int(limits["cpu"])
        assert topology.memory_gib - host.reserve.memory_gib <= int(limits["memory"].removesuffix("Gi"))


def test_each_group_grows_to_the_bounds_of_the_spec() -> None:
    """Otherwise Ray's autoscaler would not start a machine that is requested, or keep one that is not needed."""
    bounds = {str(host.instance): (host.min, host.max) for host in fleet().hosts}

    assert bounds == {
        group["labels"]["corewright-instance"]: (group["minReplicas"], group["maxReplicas"])
        for group in GROUPS.values()
    }


def test_a_few_small_replicas_get_small_hosts_and_large_ones_a_large_host() -> None:
    """Both groups are used: each time the cheapest machines that hold what the first host does not."""
    small = chosen({"qwen2.5-7b-instruct": 4, "tinyllama-1.1b-chat": 6})
    large = chosen({"qwen2.5-7b-instruct": 8, "tinyllama-1.1b-chat": 1})

    assert small == ["inf2.8xlarge/0", "inf2.8xlarge/1"]
    assert large == ["inf2.48xlarge/1"]


def test_the_head_ends_within_its_grace_period() -> None:
    """Ray's drain takes as long as Kubernetes waits before it kills the pod, and nothing can move from the head."""
    env = {entry["name"]: entry["value"] for entry in HEAD["template"]["spec"]["containers"][0]["env"]}
    assert env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] == "0"
    for group in GROUPS.values():
        of_worker = {entry["name"]: entry["value"] for entry in group["template"]["spec"]["containers"][0]["env"]}
        assert env == of_worker | {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}


def fleet() -> Spec:
    spec = parse((FOLDER / "fleet.yaml").read_bytes(), "fleet.yaml", "/").spec
    assert spec is not None
    return spec


def group_of(instance: str) -> dict[str, Any]:
    return next(group for group in GROUPS.values() if group["labels"]["corewright-instance"] == instance)


def chosen(counts: dict[str, int]) -> list[str]:
    """The hosts that are added when the models have so many replicas."""
    spec = fleet()
    models = tuple(
        model.model_copy(update={"replicas": model.replicas.model_copy(update={"min": counts[model.name]})})
        for model in spec.models
    )
    spec = spec.model_copy(update={"models": models})
    choice = plan_on_cluster(spec, hosts_for(spec, Machine((0, 1))), {})
    assert choice.plan.unplaced == ()
    return [host.name for host in choice.hosts]
