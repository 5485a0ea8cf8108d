"""The command `init`: writes a commented spec for this machine."""

from __future__ import annotations

from pathlib import Path
from string import Template
from typing import Annotated

from orchestrator.cli.app import DEMO, app, argument, one_of, option
from orchestrator.cli.output import say, stdout
from orchestrator.process.failure import Failed
from placements.engines.evidence import THIN, served_on
from placements.facts.topology import DEGREES, TOPOLOGIES, Topology, doubt
from placements.spec.notation import name_from
from workers.host import host_facts as this_host

CHAT, SMALL = "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"  # if no report is known
UNPROVEN = "No report of these models on such machines is known."
LARGEST = 8  # tp_degree of CHAT, if the instance type has it
LEAST_GIB = 64  # of host memory for a model of 8 billion parameters: loading takes a quarter of it
SMALL_BILLIONS = 4.0  # the most parameters (10^9) of a model on a smaller host

ANY_SOURCE = "a hub id, a folder, or s3://BUCKET/PREFIX"
SPECS = Path(__file__).parent / "specs"  # templates
GATED = """
    # This one is gated: accept its license on the hub, and set HF_TOKEN to a token of that account."""


def spec_for(topology: Topology | None, name: str, *, here: bool = True) -> str:
    """Returns the text of a spec for a machine; None: one without Neuron devices. ``name`` is the file's. ``here``: it
    is this machine."""
    if topology is None:
        return _filled("emulated", name=name, tiny=DEMO.parent / "models" / "tiny")
    rows = DEGREES[topology.family].values()
    degrees = [row.tp for row in rows if row.tp <= topology.cores and not doubt(topology, row)]
    large = topology.memory_gib >= LEAST_GIB
    reports = [
        report
        for report in served_on(topology.family)
        if int(report.tp_degree) in degrees and (large or float(report.billions) <= SMALL_BILLIONS)
    ]
    chosen = reports[:1] + reports[1:][-1:]  # the one with the best report, and the smallest one
    models = [(report.model, int(report.tp_degree), f"served by others: {report.source}") for report in chosen]
    evidence = f"Others served these models on Neuron SDK {reports[0].sdk}. {THIN}" if reports else UNPROVEN
    models = models or [
        (CHAT, max(tp for tp in degrees if tp <= LARGEST), ANY_SOURCE),
        (SMALL, 2 if 2 in degrees else 1, ANY_SOURCE),
    ]
    source, first, remark = models[0]
    text = _filled(
        "machine",
        machine=f"this {topology.instance}" if here else topology.instance,
        instance=topology.instance,
        cores=topology.cores,
        devices=topology.devices,
        vcpus=topology.vcpus,
        name=name,
        evidence=evidence,
        chat=name_from(source).lower(),
        source=source,
        remark=remark,
        gated=GATED if source == CHAT else "",
        tp=first,
        degrees=", ".join(map(str, degrees)),
    )
    for source, tp, remark in models[1:]:
        if left := (topology.cores - first) // tp:
            text += "\n" + _filled("second_model", source=source, remark=remark, tp=tp, most=min(4, left))
    return text


def _filled(template: str, **values: object) -> str:
    return Template((SPECS / f"{template}.yaml").read_text(encoding="utf-8")).substitute(values)


@app.command()
def init(
    file: Annotated[Path, argument("FILE", "The file to write; - for standard output.")] = Path("fleet.yaml"),
    instance: Annotated[str | None, option("TYPE", "The instance type.", default="this machine's")] = None,
) -> None:
    """Write a commented spec for this machine. Never overwrites a file."""
    if instance is not None:
        one_of("--instance", instance, TOPOLOGIES)
    found = instance or this_host.instance_type()
    name = "fleet.yaml" if str(file) == "-" else str(file)
    text = spec_for(TOPOLOGIES.get(found or ""), name, here=instance is None)
    if str(file) == "-":
        stdout().write(text)
        return
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise Failed("spec-exists", f"{file} exists", "remove it, or pass another name") from None
    except OSError as error:
        raise Failed("output-unwritable", f"{file}: {error.strerror}", "pass another FILE") from None
    say(f"written to {file}; next: corewright up {file}")
