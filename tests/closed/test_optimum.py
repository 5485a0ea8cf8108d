"""The Optimum Neuron adapter over the package's own code, against the CPU engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.closed.optimum_lane import real_optimum as real_optimum
from tests.doubles import Neuron
from tests.workers import nxdi_traffic, optimum_traffic
from tests.workers.conftest import checkpoint as checkpoint
from tests.workers.nxdi_traffic import FULL, Arrival, Checkpoints, Expected, arrivals, cpu, refused, served
from tests.workers.nxdi_traffic import expected as expected
from tests.workers.nxdi_traffic import sources as sources
from tests.workers.optimum_traffic import opened
from workers.engines.optimum_neuron import artifacts
from workers.engines.optimum_neuron.package import find_package
from workers.engines.package_contract import drift

pytestmark = [
    pytest.mark.real,
    pytest.mark.filterwarnings(*(f"ignore::{kind}" for kind in ("DeprecationWarning", "FutureWarning", "UserWarning"))),
]


@pytest.fixture
def optimum(real_optimum: Neuron, monkeypatch: pytest.MonkeyPatch) -> Neuron:
    """The package, with compiles in this process."""
    monkeypatch.setattr(artifacts, "compile_in_subprocess", optimum_traffic.export_here)
    return real_optimum


def test_the_package_is_as_recorded(optimum: Neuron) -> None:
    """Each signature of the contract."""
    assert drift("optimum-neuron").lines() == []


CASES = [
    *((family, degree, "host") for family in ("llama", "qwen2", FULL, "mixtral") for degree in (1, 2)),
    *(("llama", degree, "device") for degree in (1, 2)),
    *((family, 1, "device") for family in ("qwen2", FULL)),
]


@pytest.mark.parametrize(("family", "degree", "sampling"), CASES)
def test_tokens_equal_the_cpu_engines(
    family: str, degree: int, sampling: str, optimum: Neuron, sources: Checkpoints, expected: Expected, tmp_path: Path
) -> None:
    """Greedy, while requests arrive and others are cancelled; a mixtral's batches are static."""
    engine = opened(sources(family), tmp_path, tp_degree=degree, sampling=sampling)
    assert engine.spec.continuous is (family != "mixtral")
    answers = served(engine, arrivals())
    assert nxdi_traffic.wrong(sources(family), arrivals(), expected(family), answers) == []


@pytest.mark.parametrize(("family", "degree"), [("mixtral", 1), ("qwen2", 2), (FULL, 2)])
def test_sampling_on_the_device_is_refused_where_the_package_has_none(
    family: str, degree: int, optimum: Neuron, sources: Checkpoints, tmp_path: Path
) -> None:
    """The package switches it off for a batch of qwen2 on two cores, after a fault of the SDK."""
    error = refused(lambda: opened(sources(family), tmp_path, tp_degree=degree, sampling="device"))
    assert (error.id, error.hint) == ("bad-engine-option", "set `sampling: host`")


def test_what_was_exported_is_reused(optimum: Neuron, sources: Checkpoints, tmp_path: Path) -> None:
    """By the next start with the same settings, which compiles nothing."""
    opened(sources("llama"), tmp_path).close()
    compiled = [path.name for path in tmp_path.glob("*/corewright.json")]
    (optimum.state / "compiled.jsonl").unlink(missing_ok=True)
    opened(sources("llama"), tmp_path).close()
    assert [path.name for path in tmp_path.glob("*/corewright.json")] == compiled


def test_a_prompt_is_run_in_chunks(optimum: Neuron, sources: Checkpoints, expected: Expected, tmp_path: Path) -> None:
    """From 0.4.6 on, of 16 tokens here, with the same tokens; earlier versions refuse the option."""
    options = {"prefill_chunk_size": 16}
    if tuple(map(int, find_package().version.split(".")[:3])) < (0, 4, 6):
        error = refused(lambda: opened(sources("llama"), tmp_path, engine_options=options))
        assert error.id == "bad-engine-option"
        return
    for sampling in ("host", "device"):
        engine = opened(sources("llama"), tmp_path, sampling=sampling, engine_options=options)
        assert engine._model.neuron_config.prefill_chunk_size == 16
        answers = served(engine, arrivals())
        assert nxdi_traffic.wrong(sources("llama"), arrivals(), expected("llama"), answers) == []


def test_a_prompt_of_one_token_ends_at_that_token(optimum: Neuron, sources: Checkpoints, tmp_path: Path) -> None:
    """The package would take the padding that it adds itself for the end."""
    requests: list[Arrival] = [("a", [7], 8, False), ("b", [9, 8], 8, False)]
    answers = served(opened(sources("llama"), tmp_path), requests)
    assert nxdi_traffic.wrong(sources("llama"), requests, served(cpu(sources("llama")), requests), answers) == []
