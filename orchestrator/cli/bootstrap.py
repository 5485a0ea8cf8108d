"""The steps of `corewright doctor --bootstrap`: from an image of AWS's to a running fleet, by the table of releases.
Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.process.text_table import columns
from placements.engines.capabilities import Capabilities
from placements.engines.cpu.capabilities import FIRST_TRANSFORMERS
from placements.engines.evidence import THIN, Evidence, ModelVariant, evidence_of, served_on
from placements.engines.registry import (
    AUTO_ENCODER,
    AUTO_ENGINES,
    ENGINES,
    HOST_ENGINES,
    Engine,
    candidates_of,
    capabilities,
    sdks_with,
)
from placements.engines.vllm.capabilities import RELEASES, release_for
from placements.facts.neuron_releases import SDKS, Environment, Sdk, environments_on, next_series, sdk_named
from placements.facts.topology import family_of
from placements.facts.versions import reaches, series
from placements.spec.problems import Problem
from workers.host.interpreter import FleetVersions, Interpreter, refusal, vllm_refusal

DISK_GIB = 500
BUILD = "The wheel: `pip wheel --no-deps --wheel-dir dist .` in a clone of the repository."
DEFAULT_INSTANCE = "inf2.48xlarge"
PREFERRED: tuple[Engine, ...] = ("nxd-inference", "vllm")  # the last release is chosen that has one


@dataclass(frozen=True)
class ModelReading:
    """A model of the spec, by what decides its engine."""

    name: str
    engine: Engine
    kind: str
    variant: ModelVariant | None  # None: its config.json was not read
    where: str
    tp_degree: int = 1

    @property
    def family(self) -> str | None:
        """Its model_type."""
        return None if self.variant is None else self.variant.family


@dataclass(frozen=True)
class ModelEntry:
    """A model with the engine that serves it on the image, or the reason why none does."""

    name: str
    family: str | None
    engine: Engine | None
    reason: str | None = None
    evidence: Evidence | None = None  # None: its engine or its config.json is not known


@dataclass(frozen=True)
class BootstrapStep:
    """A step: its title, lines to run or to write, and remarks on them."""

    title: str
    commands: tuple[str, ...]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class MachineSituation:
    """What the steps depend on."""

    corewright: str
    here: str | None  # the instance type of this machine; None: it has no Neuron devices
    installed: Mapping[str, str] = field(default_factory=dict)  # environment of this machine -> series of the SDK
    sdk: str | None = None  # as named on the command line
    spec: str | None = None  # the spec's file
    instance: str | None = None  # of the spec's hosts
    models: tuple[ModelReading, ...] = ()


@dataclass(frozen=True)
class Bootstrap:
    """The steps, with the engines and the models that they lead to."""

    instance: str
    here: str | None
    sdk: Sdk | None = None  # None: there are no steps, only problems
    environment: Environment | None = None
    engines: tuple[EngineEntry, ...] = ()
    models: tuple[ModelEntry, ...] = ()
    steps: tuple[BootstrapStep, ...] = ()
    problems: tuple[Problem, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """Returns the JSON of `doctor --bootstrap -o json`."""
        return {
            "machine": {"instance": self.instance, "this": self.here},
            "sdk": None if self.sdk is None else {"version": self.sdk.sdk, "released": self.sdk.released},
            "image": None if self.environment is None else self.environment.image,
            "environment": None if self.environment is None else self.environment.path,
            "steps": self.steps,
            "engines": self.engines,
            "models": self.models,
            "problems": self.problems,
        }

    @property
    def text(self) -> str:
        """The steps as text."""
        lines = [f"machine  {self.instance} ({'this one' if self.here else 'this one has no Neuron devices'})"]
        if self.sdk is not None:
            lines.append(f"SDK      {self.sdk.sdk} of {self.sdk.released}")
        for count, step in enumerate(self.steps, 1):
            lines += ["", f"{count}. {step.title}"]
            lines += [f"   {line}" for line in step.commands]
            lines += [f"   # {remark}" for remark in step.remarks]
        if self.engines:
            lines += ["", columns(COLUMNS, [entry.row for entry in self.engines])]
        if self.models:
            rows = [
                (model.name, model.family, model.engine, model.evidence and model.evidence.text, model.reason)
                for model in self.models
            ]
            lines += ["", columns(("MODEL", "FAMILY", "ENGINE", "REPORTS", "REASON"), rows)]
        return "\n".join(lines)


def bootstrap(situation: MachineSituation) -> Bootstrap:
    """Returns the steps to a fleet.

    1. The release of the SDK: as named; else one whose image has every engine of the spec, or else NxD Inference.
       Several releases are compared in this order: the most models of the spec that it serves, the fewest that are
       known to fail, this machine's release, the best confidence with which others served or compiled the models
       (`evidence`), the latest release. If no models were read, the recommended ones are used.
    2. Its image: this machine's, or that with the most of these engines.
    3. The environment of the fleet: that of an engine of the spec, NxD Inference before transformers-neuronx; a new one
       if only vLLM is used.
    """
    instance = situation.here or situation.instance or DEFAULT_INSTANCE
    machines = family_of(instance)
    named = {model.engine for model in situation.models if model.engine in NEURON}
    sdk = _release(named, situation, instance) if situation.sdk is None else sdk_named(situation.sdk)
    if sdk is None:
        return Bootstrap(instance, situation.here, problems=(_unknown(situation.sdk or ""),))
    os = _os(sdk, named, situation, machines)
    if os is None:
        return Bootstrap(instance, situation.here, sdk, problems=(_no_engine(sdk, machines),))
    engines = on_image(sdk, os, machines)
    models = tuple(_served(model, engines, sdk, instance) for model in situation.models)
    used = {model.engine for model in models}
    working = {entry.engine for entry in engines if entry.works}
    hosting = {capabilities(engine).beside or engine for engine in used if engine is not None}
    launched = (name for name, engine in ENGINES.items() if engine.launches)
    preferred = sorted((*AUTO_ENGINES, *launched), key=lambda engine: engine not in hosting)
    environments = (environment_of(sdk, os, engine) for engine in preferred if engine in working)
    environment = next(item for item in environments if item is not None)
    problems = [
        _unserved(reading, model, sdk, machines)
        for reading, model in zip(situation.models, models, strict=True)
        if model.engine is None
    ]
    steps = _steps(situation, (instance, sdk, environment), used, engines)
    return Bootstrap(instance, situation.here, sdk, environment, engines, models, tuple(steps), tuple(problems))


def _release(named: set[Engine], situation: MachineSituation, instance: str) -> Sdk | None:
    """Returns a release with all engines, of a tested series of NxD Inference. If no release has all, returns one with
    the first of the preferred engines."""
    engines = sorted(name for name in named if not ENGINES[name].absent) or [PREFERRED[0]]
    machines, here = family_of(instance), set(situation.installed.values())
    releases = [set(sdks_with(engine, machines)) for engine in engines]
    common = [sdk for sdk in SDKS if all(sdk in having for having in releases)]
    tested = [sdk for sdk in common if all(_is_tested(sdk, ENGINES[name]) for name in engines)]
    models = [model for model in situation.models if model.variant] or [
        ModelReading(report.model, PREFERRED[0], "generate", report.variant, "", int(report.tp_degree))
        for report in served_on(machines)
    ]

    def proof(sdk: Sdk) -> tuple[int, int, bool, int, int, int]:
        os = _os(sdk, named, situation, machines)
        image = on_image(sdk, os, machines) if os else ()
        entries = [_served(model, image, sdk, instance) for model in models]
        known = [entry.evidence for entry in entries if entry.evidence]
        failed, served, compiled = (
            sum(each.weight for each in known if each.status == status) for status in ("failed", "served", "compiled")
        )
        count = sum(entry.engine is not None for entry in entries)
        return count, -failed, sdk.series in here, served, compiled, SDKS.index(sdk)

    if tested:
        return max(tested, key=proof)
    return None if engines == [PREFERRED[0]] else _release(set(), situation, instance)


def _os(sdk: Sdk, named: set[Engine], situation: MachineSituation, machines: str) -> str | None:
    """Returns the operating system of the image with the most engines of the spec, or else with any."""
    usual = set(PREFERRED) | set(AUTO_ENGINES)
    paths = {path for path, series in situation.installed.items() if series == sdk.series}
    return best_os(sdk, named or usual, machines, paths) or best_os(sdk, usual, machines, paths)


def _is_tested(sdk: Sdk, engine: Capabilities) -> bool:
    return not engine.versions or series(str(getattr(sdk, engine.module))) in engine.versions


def _served(model: ModelReading, engines: Sequence[EngineEntry], sdk: Sdk, instance: str) -> ModelEntry:
    """Returns the engine of a model on the image."""
    if model.engine in HOST_ENGINES or capabilities(model.engine).forwards:
        return ModelEntry(model.name, model.family, model.engine)
    candidates = candidates_of(model.engine if model.kind == "generate" or model.engine != "auto" else AUTO_ENCODER)
    reasons = []
    for candidate in candidates:
        entry = next(entry for entry in engines if entry.engine == candidate)
        if entry.works and (not entry.families or model.family is None or model.family in entry.families):
            variant = model.variant
            evidence = evidence_of(variant, candidate, sdk, instance, model.tp_degree) if variant else None
            return ModelEntry(model.name, model.family, candidate, evidence=evidence)
        reasons.append(f"{candidate} {entry.reason or f'{entry.version} does not serve {model.family}'}")
    return ModelEntry(model.name, model.family, None, "; ".join(reasons))


def _steps(
    situation: MachineSituation,
    image: tuple[str, Sdk, Environment],
    used: set[Engine | None],
    engines: Sequence[EngineEntry],
) -> list[BootstrapStep]:
    """Returns the steps to a fleet on an image: the instance type, the release, and the fleet's environment.

    ``used``: the engines of the spec's models.
    """
    instance, sdk, environment = image
    wheel = f"./corewright-{situation.corewright}-py3-none-any.whl[json]"
    spec = situation.spec or "fleet.yaml"
    steps = [_image(situation, sdk, environment)]
    launches = ENGINES[environment.engine].launches
    if launches:  # its Python stays as it is
        commands = ("python3 -m venv ~/corewright", "source ~/corewright/bin/activate", f"pip install '{wheel}'")
        steps.append(BootstrapStep("Install corewright into an environment of its own", commands, (BUILD,)))
    else:
        versions = {"Python": environment.python, "torch": environment.torch}
        versions[environment.engine] = environment.version_in(sdk)
        contents = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        activate = (f"source {environment.path}/bin/activate",)
        steps.append(BootstrapStep("Activate the engine's environment", activate, (contents,)))
        commands = (
            "pip list --format=freeze | grep -v '^corewright==' > image.txt",
            f"pip install --dry-run -c image.txt '{wheel}'",
            f"pip install -c image.txt '{wheel}'",
        )
        conflict = "If the dry run reports a conflict, stop: corewright must not change the engine's packages."
        title = "Check that no package of the image changes, then install corewright"
        steps.append(BootstrapStep(title, commands, (BUILD, conflict)))
    own = f"{environment.path}/bin/python" if not launches else ""
    others = [entry for entry in engines if entry.works and entry.python != own and (not used or entry.engine in used)]
    if others:
        lines = ("engines:", *(f"  {entry.engine}: {{{_settings(entry, instance)}}}" for entry in others))
        remarks = tuple(
            f"Steps 2 and 3 also for {entry.engine}." for entry in others if not ENGINES[entry.engine].launches
        )
        steps.append(BootstrapStep("Set the interpreters of other engines in the spec", lines, remarks))
    verbs = ("doctor", "up") if launches else ("doctor", "compile", "up")
    start = tuple(f"corewright {verb} {spec}" for verb in verbs)
    proven = [report.model for report in served_on(family_of(instance)) if report.sdk == sdk.series]
    remarks = (f"Served by others on SDK {sdk.series}: {', '.join(proven)}. {THIN}",) if proven else ()
    steps.append(BootstrapStep("Check the machine, and start the fleet", start, () if used else remarks))
    if situation.here is None:
        commands = ("make venv", f".venv/bin/corewright plan {spec}", f".venv/bin/corewright up {spec}")
        remark = f"With `hosts: {{emulate: {instance}}}` and `defaults: {{engine: cpu}}` in the spec."
        title = "Without such a machine: emulate its cores here, in a clone of the repository"
        steps.append(BootstrapStep(title, commands, (remark,)))
    return steps


def _settings(entry: EngineEntry, instance: str) -> str:
    """Returns the settings of an engine in ``engines``: its Python, and vLLM's plugin if it is not the default one."""
    release = next((item for item in RELEASES if item.vllm == series(entry.version or "")), None)
    if not ENGINES[entry.engine].launches or release in (None, release_for(family_of(instance))):
        return f"python: {entry.python}"
    return f'python: {entry.python}, plugin: "{release.plugin}"'


def _image(situation: MachineSituation, sdk: Sdk, environment: Environment) -> BootstrapStep:
    """Returns the step that finds the image, unless this machine has it."""
    if situation.installed.get(environment.path) == sdk.series:
        return BootstrapStep(f"The image: this machine has Neuron SDK {sdk.series}", ())
    name = situation.sdk if situation.sdk == sdk.sdk else f"{sdk.series}."
    find = (
        "aws ec2 describe-images --owners amazon --include-deprecated \\",
        f"    --filters 'Name=name,Values={environment.image}*' 'Name=description,Values=*Neuron SDK {name}*' \\",
        "    --query 'sort_by(Images, &CreationDate)[-1].[ImageId, Name, Description]' --output text",
    )
    remarks = []
    if (later := next_series(sdk)) is not None:
        remarks.append(f"If it prints None: the last image of this name from before {later.released}.")
        remarks.append(f"Not {environment.parameter}, which may be of a later SDK.")
    if sdk.superseded:
        remarks.append(f"Security: AWS has published no updates of this image since {sdk.superseded}. Install the")
        remarks.append("updates of its operating system, and allow access from your own network only.")
    if environment.support_ended:
        remarks.append(f"AWS ended the support of this environment on {environment.support_ended}.")
    if containers := [item for item in map(environment.container_in, SDKS) if item and f"-sdk{sdk.series}." in item]:
        remarks.append(f"Container: {containers[-1]}")
    title = f"Start a machine from the image {environment.image}, with a disk of {DISK_GIB} GiB"
    return BootstrapStep(title, find, tuple(remarks))


def _unknown(name: str) -> Problem:
    known = dict.fromkeys(sdk.series for sdk in SDKS)
    fact = f"Neuron SDK {name} is not in corewright's table"
    return Problem("sdk-unknown", "error", "", fact, f"set --sdk to one of {', '.join(known)}")


def _no_engine(sdk: Sdk, machines: str) -> Problem:
    fact = f"no image of Neuron SDK {sdk.series} has an engine of corewright that works on {machines}"
    return Problem("sdk-without-engine", "error", "", fact, _releases(machines))


def _unserved(reading: ModelReading, model: ModelEntry, sdk: Sdk, machines: str) -> Problem:
    fact = f"{model.name}: no engine serves it on the image of Neuron SDK {sdk.series}: {model.reason}"
    return Problem("sdk-without-engine", "warning", reading.where, fact, _releases(machines))


def _releases(machines: str) -> str:
    """Returns the releases with each engine, as a hint."""
    spans = []
    for engine in dict.fromkeys((*PREFERRED, *AUTO_ENGINES)):
        having = [sdk.series for sdk in sdks_with(engine, machines)]
        if having:
            spans.append(f"{engine} {having[0]} to {having[-1]}")
    return f"SDKs with an engine for {machines}: {', '.join(spans)}"


NEURON: tuple[Engine, ...] = ("nxd-inference", "vllm", "transformers-neuronx", "torch-neuronx", "optimum-neuron")
COLUMNS = ("ENGINE", "VERSION", "PYTHON", "MODELS OR REASON")
ANY = "families of its vLLM, not checked"
_FAMILIES = sorted({family for engine in ENGINES.values() for family in engine.families})


@dataclass(frozen=True)
class EngineEntry:
    """An engine with its version and interpreter, and the families that it serves, or why it does not work."""

    engine: Engine
    version: str | None = None  # None: not there
    python: str | None = None
    families: tuple[str, ...] = ()  # empty for vllm, which decides itself
    reason: str | None = None

    @property
    def works(self) -> bool:
        """True if models can be served with it."""
        return not self.reason

    @property
    def row(self) -> tuple[str | None, ...]:
        """The line of a table: engine, version, interpreter, and families or reason."""
        return self.engine, self.version, self.python, self.reason or ", ".join(self.families) or ANY


def entry(engine: Engine, version: str, python: str, machines: str | None) -> EngineEntry:
    """Returns the entry of a version in an interpreter. ``machines`` None: any family of machines."""
    able = ENGINES[engine]
    reason = None if machines is None else able.unsupported(version, machines)
    families = () if reason or able.own_families else _FAMILIES
    served = tuple(name for name in families if able.serves(name, machines, version or None))
    return EngineEntry(engine, version, python, served, reason)


def absent(engine: Engine, machines: str | None) -> str:
    """Returns where an engine that is not there can be had."""
    if ENGINES[engine].absent:
        return ENGINES[engine].absent
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
            if sdk.transformers and reaches(sdk.transformers, FIRST_TRANSFORMERS):
                beside = [name for name, engine in ENGINES.items() if engine.beside == environment.engine]
                entries += [entry(name, environment.torch, python, machines) for name in beside]
    return _best(entries, machines)


def on_machine(
    interpreters: Iterable[Interpreter], machines: str | None, fleet: FleetVersions
) -> tuple[EngineEntry, ...]:
    """Returns the engines in interpreters of a machine."""
    entries = []
    for interpreter in interpreters:
        for engine in NEURON:
            able = ENGINES[engine]
            if version := able.version_among(interpreter.packages):
                item = entry(engine, version, interpreter.python, machines)
                refused = vllm_refusal(interpreter, None) if able.launches else refusal(interpreter, fleet, engine)
                if item.works and refused is not None:
                    reason = refused.what.removeprefix(f"{interpreter.python} ")
                    if not able.launches and interpreter.corewright is None:
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
        if item.engine in wanted and ENGINES[item.engine].unsupported(item.version_in(sdk), machines) is None:
            having.setdefault(item.os, []).append(item)
    return max(
        having, key=lambda os: (any(item.path in installed for item in having[os]), len(having[os])), default=None
    )


def environment_of(sdk: Sdk, os: str, engine: Engine) -> Environment | None:
    """Returns the environment of an engine on an image."""
    return next((item for item in environments_on(sdk) if item.os == os and item.engine == engine), None)
