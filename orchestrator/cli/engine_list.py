"""Lists which engines work with which models: on an image of AWS, by the table of releases, or on a machine. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from placements.facts.engines import (
    CPU_TRANSFORMERS,
    NXD_FAMILIES,
    OPTIMUM_FAMILIES,
    TNX_FAMILIES,
    TRACED_FAMILIES,
    Engine,
    reaches,
    serves,
)
from placements.facts.neuron_releases import Environment, Sdk, environments_on, sdks_with, unsupported
from workers.host.interpreter import Interpreter, refusal
from workers.host.vllm_interpreter import vllm_refusal

NEURON: tuple[Engine, ...] = ("nxd-inference", "vllm", "transformers-neuronx", "torch-neuronx", "optimum-neuron")
COLUMNS = ("ENGINE", "VERSION", "PYTHON", "MODELS OR REASON")
ANY = "families of its vLLM, not checked"
_FAMILIES = sorted({*NXD_FAMILIES, *TNX_FAMILIES, *TRACED_FAMILIES}.union(*OPTIMUM_FAMILIES.values()))


@dataclass(frozen=True)
class EngineEntry:
    """An engine with its version and interpreter, and the families that it serves, or why it does not work."""

    engine: Engine
    version: str = ""  # "": not there
    python: str = ""
    families: tuple[str, ...] = ()  # empty for vllm, which decides itself
    reason: str = ""

    @property
    def works(self) -> bool:
        """True if models can be served with it."""
        return not self.reason

    @property
    def row(self) -> tuple[str | None, ...]:
        """The line of a table: engine, version, interpreter, and families or reason."""
        served = ", ".join(self.families) or ANY
        return self.engine, self.version or None, self.python or None, self.reason or served

    def as_dict(self) -> dict[str, object]:
        """Returns the entry for JSON."""
        return {
            "engine": self.engine,
            "version": self.version or None,
            "python": self.python or None,
            "families": list(self.families),
            "reason": self.reason or None,
        }


def entry(engine: Engine, version: str, python: str, machines: str | None) -> EngineEntry:
    """Returns the entry of a version in an interpreter. ``machines`` None: any family of machines."""
    reason = "" if machines is None else unsupported(engine, version, machines) or ""
    if reason or engine == "vllm":
        return EngineEntry(engine, version, python, (), reason)
    return EngineEntry(
        engine, version, python, tuple(name for name in _FAMILIES if serves(engine, name, machines, version or None))
    )


def absent(engine: Engine, machines: str | None) -> str:
    """Returns where an engine that is not there can be had."""
    if engine == "torch-neuronx":
        return f"needs torch-neuronx beside transformers {CPU_TRANSFORMERS} or later"
    if engine == "optimum-neuron":
        return "not in AWS's images; see docs/engines.md"
    if machines is None:
        return "not installed"
    releases = sdks_with(engine, machines)
    if not releases:
        return f"does not run on {machines}"
    os = next(item.os for item in environments_on(releases[-1]) if item.engine == engine)
    return f"the last image with it: SDK {releases[-1].series}, {os}"


def on_image(sdk: Sdk, os: str, machines: str) -> tuple[EngineEntry, ...]:
    """Returns the engines on the image of a release for an operating system, by the table."""
    entries = []
    for environment in environments_on(sdk):
        python = f"{environment.path}/bin/python"
        if environment.os == os:
            entries.append(entry(environment.engine, environment.version_in(sdk), python, machines))
            has_nxd = environment.engine == "nxd-inference" and sdk.transformers
            if has_nxd and reaches(sdk.transformers, CPU_TRANSFORMERS):
                entries.append(entry("torch-neuronx", environment.torch, python, machines))
    return _best(entries, machines)


def on_machine(
    interpreters: Iterable[Interpreter], machines: str | None, *, ray: str, python: str, corewright: str
) -> tuple[EngineEntry, ...]:
    """Returns the engines in interpreters of a machine. The versions are those of the fleet."""
    entries = []
    minor = ".".join(python.split(".")[:2])
    for interpreter in interpreters:
        versions = {
            **interpreter.engines,
            "vllm": interpreter.packages.get("vllm") if "vllm-neuron" in interpreter.packages else None,
            "torch-neuronx": interpreter.packages.get("torch-neuronx"),
        }
        for engine in NEURON:
            if version := versions.get(engine):
                item = entry(engine, version, interpreter.python, machines)
                refused = (
                    vllm_refusal(interpreter, None)
                    if engine == "vllm"
                    else refusal(interpreter, engine, ray=ray, python_minor=minor, corewright=corewright)
                )
                if item.works and refused is not None:
                    reason = refused.what.removeprefix(f"{interpreter.python} ")
                    if engine != "vllm" and interpreter.corewright is None:
                        reason = "has no corewright; `corewright doctor --bootstrap` shows how to install it"
                    item = EngineEntry(engine, version, interpreter.python, (), reason)
                entries.append(item)
    return _best(entries, machines)


def _best(entries: Sequence[EngineEntry], machines: str | None) -> tuple[EngineEntry, ...]:
    """Returns one entry for each engine: one that works, else one that is there, else where it can be had."""
    return tuple(
        max(
            (item for item in entries if item.engine == engine),
            key=lambda item: item.works,
            default=EngineEntry(engine, reason=absent(engine, machines)),
        )
        for engine in NEURON
    )


def best_os(sdk: Sdk, engines: Iterable[Engine], machines: str, installed: Collection[str]) -> str | None:
    """Returns the operating system whose image has the most of these engines for a family of machines; None: no image
    has one of them. One with an ``installed`` environment comes first, then the preferred one."""
    wanted = set(engines)
    having: dict[str, list[Environment]] = {}
    for item in environments_on(sdk):
        if item.engine in wanted and unsupported(item.engine, item.version_in(sdk), machines) is None:
            having.setdefault(item.os, []).append(item)
    return max(
        having, key=lambda os: (any(item.path in installed for item in having[os]), len(having[os])), default=None
    )


def environment_of(sdk: Sdk, os: str, engine: Engine) -> Environment | None:
    """Returns the environment of an engine on an image."""
    return next((item for item in environments_on(sdk) if item.os == os and item.engine == engine), None)
