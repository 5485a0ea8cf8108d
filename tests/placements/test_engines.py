from __future__ import annotations

import pytest

from placements.engines import Engine, default_dtype, needs_neuron, resolve, takes_cores
from tests.placements.fleets import PLAIN, host

EMULATED, REAL = host(emulated=True), host()


@pytest.mark.parametrize(("on", "engine"), [(EMULATED, "cpu"), (PLAIN, "cpu"), (REAL, "auto")])
def test_auto_is_cpu_where_no_accelerator_is(on: object, engine: str) -> None:
    """On Neuron the choice is left to the host, which knows its packages."""
    assert resolve("auto", on) == engine  # type: ignore[arg-type]


def test_a_named_engine_stays() -> None:
    """Only auto is resolved."""
    assert resolve("nxd-inference", EMULATED) == "nxd-inference"


@pytest.mark.parametrize(
    ("engine", "emulated", "real", "plain"),
    [
        ("cpu", True, False, False),
        ("echo", True, False, False),
        ("auto", True, True, False),
        ("nxd-inference", True, True, False),
    ],
)
def test_who_takes_cores(engine: Engine, emulated: bool, real: bool, plain: bool) -> None:
    """Everything takes cores of an emulated host, engines of the CPU none of a real one, nobody any of a plain one."""
    assert [takes_cores(engine, on) for on in (EMULATED, REAL, PLAIN)] == [emulated, real, plain]


def test_dtype_defaults_to_fp32_on_cpus_and_bf16_on_neuron() -> None:
    """The default dtype follows the engine."""
    assert (default_dtype("cpu"), default_dtype("echo"), default_dtype("auto")) == ("fp32", "fp32", "bf16")


def test_auto_does_not_need_neuron() -> None:
    """auto can run anywhere; a Neuron engine only on devices."""
    assert (needs_neuron("auto"), needs_neuron("cpu"), needs_neuron("torch-neuronx")) == (False, False, True)
