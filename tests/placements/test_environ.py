from __future__ import annotations

import pytest

from placements.cores import CoreRange
from placements.environ import cpu_list, environment


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
    ("cores", "lnc", "told"),
    [(CoreRange(0, 7), 1, "1"), (CoreRange(3, 3), 2, "2"), (CoreRange(0, 7), None, None), (None, 2, None)],
)
def test_cores_of_trn2_come_with_the_size_of_a_logical_one(
    cores: CoreRange | None, lnc: int | None, told: str | None
) -> None:
    """Without it the runtime would count other cores; a family without the choice, or a replica without cores, needs
    none."""
    assert environment("m", 0, cores, 1, lnc=lnc).get("NEURON_LOGICAL_NC_CONFIG") == told


def test_one_thread_may_spin_and_no_mask_is_no_variable() -> None:
    """OMP_WAIT_POLICY and COREWRIGHT_CPUS appear only where they mean something."""
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
    """The list form of taskset; NUMA order is not sorted away."""
    assert cpu_list(cpus) == text
