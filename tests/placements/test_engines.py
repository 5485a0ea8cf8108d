from __future__ import annotations

import pytest

from placements.engines.nxd_inference.capabilities import NXD_FAMILIES
from placements.engines.registry import (
    Engine,
    NoEngine,
    capabilities,
    choose_engine,
    needs_neuron,
    resolve,
    takes_cores,
)
from placements.engines.transformers_neuronx.capabilities import FAMILIES as TNX_FAMILIES
from placements.engines.transformers_neuronx.capabilities import REFUSED
from placements.facts.checkpoints import FAMILIES
from placements.facts.versions import reaches
from tests import option_tables
from tests.placements.fleets import PLAIN, host

EMULATED, REAL = host(emulated=True), host()


@pytest.mark.parametrize(("on", "engine"), [(EMULATED, "cpu"), (PLAIN, "cpu"), (REAL, "auto")])
def test_auto_is_cpu_without_an_accelerator(on: object, engine: str) -> None:
    """On Neuron the host decides, which knows its packages."""
    assert resolve("auto", on, "generate") == engine  # type: ignore[arg-type]


def test_auto_is_torch_neuronx_for_encoders_on_neuron_devices() -> None:
    """It is the only engine of AWS's packages for them; elsewhere they run on the CPU."""
    assert [resolve("auto", on, "rerank") for on in (REAL, EMULATED, PLAIN)] == ["torch-neuronx", "cpu", "cpu"]


def test_a_named_engine_stays() -> None:
    """Only auto is resolved."""
    assert resolve("nxd-inference", EMULATED, "embedding") == "nxd-inference"


@pytest.mark.parametrize(
    ("engine", "emulated", "real", "plain"),
    [
        ("cpu", True, False, False),
        ("echo", True, False, False),
        ("auto", True, True, False),
        ("nxd-inference", True, True, False),
    ],
)
def test_the_engines_that_use_cores(engine: Engine, emulated: bool, real: bool, plain: bool) -> None:
    """All engines use cores of an emulated host, CPU engines none of a real one, and none uses any of a plain one."""
    assert [takes_cores(engine, on) for on in (EMULATED, REAL, PLAIN)] == [emulated, real, plain]


def test_dtype_defaults_to_fp32_on_cpus_and_bf16_on_neuron() -> None:
    """The default dtype follows the engine."""
    assert tuple(capabilities(name).dtype for name in ("cpu", "echo", "auto")) == ("fp32", "fp32", "bf16")


def test_auto_does_not_need_neuron() -> None:
    """auto can run anywhere; a Neuron engine only on devices."""
    assert (needs_neuron("auto"), needs_neuron("cpu"), needs_neuron("torch-neuronx")) == (False, False, True)


# Which engine serves which family

NXD, TNX = "nxd-inference", "transformers-neuronx"


@pytest.mark.parametrize(
    ("model_type", "instance", "versions", "chosen"),
    [
        ("llama", "inf2.48xlarge", {NXD: "0.8.16251+f3ca5575", TNX: "0.13.798"}, NXD),
        ("llama", "inf2.48xlarge", {NXD: "0.9.17334", TNX: "0.13.798"}, TNX),  # 0.9 is in maintenance
        ("llama", "trn2.48xlarge", {NXD: "0.9.17334", TNX: "0.13.798"}, NXD),
        ("llama", "trn2.48xlarge", {NXD: "0.10.1"}, NXD),  # what is newer than all has what the newest has
        ("gpt2", "trn1.2xlarge", {NXD: "0.8.1", TNX: "0.13.798"}, TNX),
        ("mistral", "inf2.xlarge", {NXD: "0.8.1", TNX: "0.13.798"}, NXD),
        ("mistral", "trn2.3xlarge", {NXD: "0.9.1"}, NXD),
        ("llama", "inf2.24xlarge", {NXD: "0.10.18399"}, NXD),
        ("qwen2", "trn1.2xlarge", {NXD: "0.5.9230"}, NXD),
        ("qwen3", "trn1.2xlarge", {NXD: "0.6.10598"}, NXD),
        (None, "inf2.xlarge", {NXD: "0.8.1", TNX: "0.13.798"}, NXD),
        (None, "trn2.48xlarge", {TNX: "0.13", NXD: "0.8.0"}, NXD),
        ("llama", None, {TNX: "0.13.798"}, TNX),
        ("llama", "inf2.xlarge", {"optimum-neuron": "0.4.5", TNX: "0.13.798"}, TNX),
        # none
        ("llama", "inf2.xlarge", {}, "engine-not-installed"),
        ("llama", "inf2.xlarge", {"optimum-neuron": "0.4.5"}, "engine-not-installed"),
        ("gpt2", "trn2.48xlarge", {TNX: "0.13.798"}, "engine-unsupported-here"),
        ("gpt2", "inf2.xlarge", {NXD: "0.8.1"}, "family-unsupported"),
        ("qwen2", "inf2.xlarge", {NXD: "0.4.1", TNX: "0.13.798"}, "family-unsupported"),
        ("llama", "inf2.xlarge", {NXD: "0.1.1"}, "family-unsupported"),
        ("gpt_bigcode", "inf2.xlarge", {NXD: "0.8.1", TNX: "0.13.798"}, "family-unsupported"),
    ],
)
def test_auto_prefers_nxd_inference_if_it_supports_the_family(
    model_type: str | None, instance: str | None, versions: dict[Engine, str], chosen: str
) -> None:
    """In the host's version; else transformers-neuronx, else the reason why there is none."""
    choice = choose_engine(model_type, instance, versions)
    assert (choice.id if isinstance(choice, NoEngine) else choice) == chosen


@pytest.mark.parametrize(
    ("model_type", "versions", "words"),
    [
        ("gpt2", {NXD: "0.8.1"}, ("nxd-inference 0.8.1 does not serve gpt2", "install transformers-neuronx")),
        ("opt", {}, ("neither nxd-inference nor transformers-neuronx", "a Neuron SDK image")),
    ],
)
def test_a_missing_engine_is_reported_with_the_installed_ones(
    model_type: str, versions: dict[Engine, str], words: tuple[str, str]
) -> None:
    """And the remedy."""
    choice = choose_engine(model_type, "inf2.xlarge", versions)
    assert isinstance(choice, NoEngine)
    assert words[0] in choice.what
    assert words[1] in choice.hint


def test_the_tables_are_the_packages_registries() -> None:
    """As recorded, for the families that the planner supports."""
    tnx, nxd = (
        option_tables.contract(package) for package in ("transformers_neuronx", "neuronx_distributed_inference")
    )
    mapping = tnx["snapshots"][tnx["primary"]]["registries"][option_tables.REGISTRY]
    assert {*TNX_FAMILIES, *REFUSED} == set(mapping)
    assert TNX_FAMILIES.keys().isdisjoint(REFUSED)
    name = "neuronx_distributed_inference.utils.constants.MODEL_TYPES"
    for version, snapshot in nxd["snapshots"].items():
        served = {family for family, tasks in snapshot["registries"][name].items() if "causal-lm" in tasks}
        own = {**NXD_FAMILIES, "mistral": "0.9"}  # before, it goes by Llama's class
        assert {f for f, first in own.items() if reaches(version, first)} == served & set(FAMILIES)


def test_classes_that_batch_continuously_and_that_draft_are_those_of_the_contract() -> None:
    """GPT-NeoX's derives from no NeuronModelBase; two define speculative_forward."""
    recorded = option_tables.contract("transformers_neuronx")
    snapshot = recorded["snapshots"][recorded["primary"]]
    classes = {
        dotted: held for module in snapshot["modules"].values() for dotted, held in module.get("classes", {}).items()
    }
    mapping = snapshot["registries"][option_tables.REGISTRY]
    of = {family: classes[mapping[family].rpartition(".")[2]] for family in TNX_FAMILIES}
    assert {f for f, held in of.items() if "base.NeuronModelBase" not in held["bases"]} == {
        name for name in TNX_FAMILIES if TNX_FAMILIES[name].serial
    }
    assert {f for f, held in of.items() if "speculative_forward" in held["methods"]} == {
        name for name in TNX_FAMILIES if TNX_FAMILIES[name].speculates
    }
    assert not [name for name, family in TNX_FAMILIES.items() if family.continuous and family.serial]
