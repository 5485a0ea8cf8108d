"""The command `init`: writes a commented spec for this machine."""

from __future__ import annotations

from pathlib import Path
from string import Template
from typing import Annotated

from orchestrator.cli.app import DEMO, app, argument, one_of, option
from orchestrator.cli.output import say, stdout
from orchestrator.process.failure import Failed
from placements.facts.topology import DEGREES, TOPOLOGIES, Topology, doubt
from workers.host import host_facts as this_host

LARGEST = 8  # the degree of the first model, if the instance type has it
LEAST_GIB = 64  # of host memory for a model of 8 billion parameters: loading takes a quarter of it

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
    first = max(tp for tp in degrees if tp <= LARGEST)
    large = topology.memory_gib >= LEAST_GIB
    text = _filled(
        "machine",
        machine=f"this {topology.instance}" if here else topology.instance,
        instance=topology.instance,
        cores=topology.cores,
        devices=topology.devices,
        vcpus=topology.vcpus,
        name=name,
        chat="llama-3.1-8b" if large else "qwen2.5-3b",
        source="meta-llama/Llama-3.1-8B-Instruct" if large else "Qwen/Qwen2.5-3B-Instruct",
        gated=GATED if large else "",
        tp=first,
        degrees=", ".join(map(str, degrees)),
    )
    second = 2 if 2 in degrees else 1
    left = (topology.cores - first) // second
    return text + ("\n" + _filled("second_model", tp=second, most=min(4, left)) if left else "")


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
