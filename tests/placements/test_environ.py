from __future__ import annotations

import pytest

from placements.engines.registry import Engine
from placements.facts.core_range import CoreRange
from placements.planner.plan import plan
from placements.planner.spec_hosts import hosts_for
from placements.resources.environ import compiling, cpu_list, environment
from placements.spec.parse import parse
from tests.placements.fleets import LAPTOP, model


def test_a_replica_of_several_cores_and_threads() -> None:
    """Every variable of a bound replica with cores."""
    assert environment("chat", 1, CoreRange(0, 7), 61, range(8, 69)) == {
        "COREWRIGHT_CPUS": "8-68",
        "NEURON_PROCESS_TAG": "chat/1",
        "NEURON_RT_VISIBLE_CORES": "0-7",
        "OMP_NUM_THREADS": "61",
        "OMP_WAIT_POLICY": "PASSIVE",
        "RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def test_a_single_core_is_written_as_one_id() -> None:
    """optimum-neuron takes "a" or "a-b" only."""
    assert environment("m", 0, CoreRange(5, 5), 1)["NEURON_RT_VISIBLE_CORES"] == "5"


@pytest.mark.parametrize(
    ("cores", "lnc", "expected"),
    [(CoreRange(0, 7), 1, "1"), (CoreRange(3, 3), 2, "2"), (CoreRange(0, 7), None, None), (None, 2, None)],
)
def test_cores_of_trn2_have_the_size_of_a_logical_one(
    cores: CoreRange | None, lnc: int | None, expected: str | None
) -> None:
    """Without it the runtime would count other cores; a family without the choice, or a replica without cores,
    needs none.
    """
    assert environment("m", 0, cores, 1, lnc=lnc).get("NEURON_LOGICAL_NC_CONFIG") == expected


def test_one_thread_may_spin_and_an_empty_mask_is_not_a_variable() -> None:
    """OMP_WAIT_POLICY and COREWRIGHT_CPUS are set only if they have an effect."""
    assert environment("m", 0, CoreRange(5, 5), 1).keys().isdisjoint({"OMP_WAIT_POLICY", "COREWRIGHT_CPUS"})


def test_a_replica_without_cores_has_no_visible_cores() -> None:
    """An unset variable, not an empty one."""
    assert "NEURON_RT_VISIBLE_CORES" not in environment("m", 0, None, 4)


@pytest.mark.parametrize("cores", [CoreRange(0, 7), CoreRange(3, 3), None])
def test_num_cores_is_never_set(cores: CoreRange | None) -> None:
    """NEURON_RT_NUM_CORES would narrow the range for optimum-neuron."""
    assert "NEURON_RT_NUM_CORES" not in environment("m", 0, cores, 4)


@pytest.mark.parametrize(("cpus", "text"), [([0, 1, 2, 8, 9], "0-2,8-9"), ([3], "3"), ([5, 4], "5,4"), ([], "")])
def test_cpu_lists_keep_their_order(cpus: list[int], text: str) -> None:
    """The list format of taskset, in the order of the CPUs."""
    assert cpu_list(cpus) == text


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"compiler": {"optlevel": 1}}, {"NEURON_CC_FLAGS": "-O1"}),
        ({"compiler": {"flags": " --a=b  -c "}}, {"NEURON_CC_FLAGS": "--a=b -c"}),
        ({"compiler": {"optlevel": 2, "flags": "-c", "workers": 4}}, {"NEURON_CC_FLAGS": "-O2 -c"}),
        ({"neff_cache": "s3://neffs/x"}, {"NEURON_COMPILE_CACHE_URL": "s3://neffs/x"}),
        ({"neff_cache": "/neffs"}, {"NEURON_COMPILE_CACHE_URL": "/neffs"}),
        ({"quantize": "int8"}, {}),
        ({"quantize_kv": "fp8"}, {"XLA_HANDLE_SPECIAL_SCALAR": "1", "UNSAFE_FP8FNCAST": "1"}),
    ],
)
@pytest.mark.parametrize("engine", ["transformers-neuronx", "nxd-inference", "auto"])
def test_the_compiler_gets_exactly_the_settings_of_the_spec(
    engine: Engine, fields: dict[str, object], expected: dict[str, str]
) -> None:
    """An unnecessary variable would be another key in its cache."""
    wish = model("m", **fields)  # type: ignore[arg-type]
    assert compiling(wish, engine) == expected
    assert compiling(wish, "cpu") == {}


def test_a_plan_shows_the_compilers_settings() -> None:
    """In the environment of each replica on Neuron; auto is cpu on an emulated host, which compiles nothing."""
    text = "{instance: inf2.xlarge}\nmodels:\n  a: {source: ./a, neff_cache: ~/neffs, compiler: {optlevel: 3}}\n"
    names = ("NEURON_CC_FLAGS", "NEURON_COMPILE_CACHE_URL")
    shown = []
    for hosts in (text, text.replace("instance", "emulate")):
        spec = parse(f"hosts: {hosts}", "f.yaml", "/specs").spec
        assert spec is not None
        (placed,) = plan(spec, hosts_for(spec, LAPTOP)).placements
        shown.append([placed.as_dict()["env"].get(name) for name in names])
    assert shown[0][0] == "-O3"
    assert shown[0][1].endswith("/neffs")
    assert shown[1] == [None, None]
