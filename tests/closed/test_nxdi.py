"""The NxD Inference adapter over the package's own code, against the CPU engine.

Most promises are those of ``tests/workers/engines/test_nxd_inference.py``, which has them kept over a double.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from placements.facts.engines import NXD_E5M2, reaches
from tests.closed.nxd_lane import real_nxdi as real_nxdi
from tests.doubles import Neuron
from tests.workers import nxdi_traffic
from tests.workers.conftest import checkpoint as checkpoint
from tests.workers.engines import test_nxd_inference as double
from tests.workers.engines.test_nxd_inference import FULL, Checkpoints
from tests.workers.engines.test_nxd_inference import expected as expected
from tests.workers.engines.test_nxd_inference import sources as sources
from tests.workers.nxdi_traffic import MAX_LEN, arrivals, opened, served
from workers.engines.nxd_inference import artifacts
from workers.engines.nxd_inference.package import import_package
from workers.engines.package_contract import drift

pytestmark = [
    pytest.mark.real,
    pytest.mark.filterwarnings(*(f"ignore::{kind}" for kind in ("DeprecationWarning", "FutureWarning", "UserWarning"))),
]
Expected = Callable[[str], dict[str, list[int]]]

test_an_eos_ends_an_answer = double.test_an_eos_ends_an_answer
test_prompts_at_the_edges_of_buckets = double.test_prompts_at_the_edges_of_buckets
test_the_packages_padding = double.test_the_packages_padding_never_hides_the_end_of_a_prompt
test_a_mistaken_adapter_does_not_pass = double.test_a_mistaken_adapter_does_not_pass
test_the_adapter_itself_passes = double.test_the_adapter_itself_passes_what_its_mutants_do_not
test_the_device_draws_each_slot_by_its_own_parameters = double.test_the_device_draws_each_slot_by_its_own_parameters
test_a_top_k_of_0_is_the_largest = double.test_a_top_k_of_0_is_the_largest_that_the_device_takes
test_the_last_token_of_a_slot = double.test_the_last_token_of_a_slot_is_decoded_with_a_draft_too
test_every_compile_works_in_a_folder_of_its_own = double.test_every_compile_works_in_a_folder_of_its_own
test_every_bucket_is_warmed_up = double.test_every_bucket_is_warmed_up
test_a_device_fault_passes_unchanged = double.test_a_device_fault_passes_unchanged
test_cores_of_another_process = double.test_cores_of_another_process_are_a_runtime_error
test_a_quantized_checkpoint_of_another_kind = double.test_a_quantized_checkpoint_of_another_kind_is_refused
test_options_reach_the_package = double.test_options_reach_the_package


@pytest.fixture
def nxd(real_nxdi: Neuron, monkeypatch: pytest.MonkeyPatch) -> Neuron:
    """The package, with compiles in this process."""
    monkeypatch.setattr(artifacts, "compile_in_subprocess", nxdi_traffic.compile_here)
    return real_nxdi


def test_the_package_is_as_recorded(nxd: Neuron) -> None:
    """Each signature and option of the contract."""
    assert drift("nxd-inference").lines() == []


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen2", FULL, "mistral", "mistral-window", "mixtral"])
def test_tokens_equal_the_cpu_engines(
    family: str, degree: int, nxd: Neuron, sources: Checkpoints, expected: Expected, tmp_path: Path
) -> None:
    """Greedy, while requests arrive and others are cancelled."""
    if family not in double.families(import_package().version):
        pytest.skip("a family of a later version")
    answers = served(opened(sources(family), tmp_path, tp_degree=degree), arrivals())
    assert nxdi_traffic.wrong(sources(family), arrivals(), expected(family), answers) == []


@pytest.mark.parametrize("window", [MAX_LEN, 4 * MAX_LEN])
def test_a_window_that_no_slot_reaches_changes_nothing(
    window: int, nxd: Neuron, sources: Checkpoints, expected: Expected, tmp_path: Path
) -> None:
    """In no token, and not in the size of the KV cache."""
    source = Path(shutil.copytree(sources("mistral"), tmp_path / "model"))
    double.edit(source, sliding_window=window)
    engine = opened(source, tmp_path / "compiled")
    answers = served(engine, arrivals())
    assert nxdi_traffic.wrong(source, arrivals(), expected("mistral"), answers) == []
    assert {tensor.shape[2] for tensor in states(engine).values()} == {MAX_LEN}


def states(engine: Any) -> dict[str, torch.Tensor]:
    """Returns the KV cache of the first rank, each ``[slots, heads, tokens, head_dim]``."""
    return dict(engine._model.traced_model.nxd_model.states[0])


def test_one_slot(nxd: Neuron, sources: Checkpoints, expected: Expected, tmp_path: Path) -> None:
    """Without the package's continuous batching."""
    answers = served(opened(sources("llama"), tmp_path, slots=1), arrivals())
    assert nxdi_traffic.wrong(sources("llama"), arrivals(), expected("llama"), answers) == []


@pytest.mark.parametrize("degree", [1, 2])
def test_greedy_tokens_from_the_device_equal_the_hosts(
    degree: int, nxd: Neuron, sources: Checkpoints, expected: Expected, tmp_path: Path
) -> None:
    """``sampling: device``."""
    answers = served(opened(sources("llama"), tmp_path, tp_degree=degree, sampling="device"), arrivals())
    assert nxdi_traffic.wrong(sources("llama"), arrivals(), expected("llama"), answers) == []


@pytest.mark.parametrize("draft", ["itself", "another"])
def test_speculation_does_not_change_a_token(
    draft: str, nxd: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft that is always right and one that hardly ever is."""
    double.test_speculation_does_not_change_a_token("", draft, nxd, sources, tmp_path, monkeypatch)


@pytest.mark.parametrize("fields", [{"quantize": "int8"}, {"quantize": "fp8"}, {"quantize_kv": "fp8"}])
def test_quantized_models_answer_nearly_the_same(
    fields: dict[str, Any], nxd: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not exactly the same."""
    double.test_quantized_models_answer_nearly_the_same("", fields, nxd, sources, tmp_path, monkeypatch)


@pytest.mark.parametrize("fields", [{"quantize": "int8"}, {"quantize": "fp8"}, {"quantize": "fp8", "of": "f8e5m2"}])
def test_the_users_quantized_checkpoint_is_used(
    fields: dict[str, Any], nxd: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is, whatever the source's own weights are."""
    if "of" in fields and not reaches(import_package().version, NXD_E5M2):
        pytest.skip("a type of a later version")
    double.test_the_users_quantized_checkpoint_is_used(dict(fields), nxd, sources, tmp_path, monkeypatch)


def test_the_flags_of_the_spec_reach_the_compiler(
    nxd: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every graph gets them."""
    double.test_the_flags_of_the_spec_reach_the_compiler("", nxd, sources, tmp_path, monkeypatch)


@pytest.mark.parametrize("fields", [{}, {"sampling": "device"}, {"draft_source": "SELF", "draft_k": 3}])
def test_generate_once_gives_the_batchers_answer(
    fields: dict[str, Any], nxd: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`corewright generate`."""
    double.test_generate_once_gives_the_batchers_answer("", fields, nxd, sources, tmp_path, monkeypatch)


def test_artifacts_of_one_process_are_loaded_by_another(
    real_nxdi: Neuron, sources: Checkpoints, expected: Expected, tmp_path: Path
) -> None:
    """The compile holds no core; a second start compiles nothing."""
    from neuron_double.compiler import compiles

    engine = opened(sources("llama"), tmp_path / "compiled")
    first = compiles()
    assert first
    assert {record["pid"] for record in first}.isdisjoint({os.getpid()})
    assert set(real_nxdi.held().values()) == {os.getpid()}
    assert len(list((tmp_path / "compiled").glob("*/model/weights/tp*_sharded_checkpoint.safetensors"))) == 2
    engine.close()
    answers = served(opened(sources("llama"), tmp_path / "compiled"), arrivals())
    assert compiles() == first
    assert nxdi_traffic.wrong(sources("llama"), arrivals(), expected("llama"), answers) == []
