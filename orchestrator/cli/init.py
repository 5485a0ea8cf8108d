"""The command `init`: writes a commented spec for this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from orchestrator.cli.app import DEMO, app, argument, one_of, option
from orchestrator.cli.output import say, stdout
from orchestrator.process.failure import Failed
from placements.facts.topology import DEGREES, TOPOLOGIES, Topology
from workers.host import host_facts as this_host

LARGEST = 8  # the degree of the first model, if the instance type has it
LEAST_GIB = 64  # of host memory for a model of 8 billion parameters: loading takes a quarter of it

EMULATED = """\
# A fleet on an emulated inf2.48xlarge, since this machine has no Neuron devices.
# Its 24 NeuronCores are emulated; processes, claims of cores and tokens are real.
#
#     corewright validate {name}    # check it
#     corewright plan {name}        # preview the placement
#     corewright up {name}          # start the fleet; Ctrl-C stops it
#     corewright apply {name}       # change a running fleet
version: 1
name: fleet

hosts: {{emulate: inf2.48xlarge}}  # instead of `instance: inf2.48xlarge` for the real machine

defaults:            # for all models, unless they set the field
  engine: cpu        # plain PyTorch; the engines for NeuronCores need devices
  max_len: 512       # tokens of one request: prompt + output
  max_batch: 4       # slots: concurrent requests of a replica

models:
  assistant:         # clients send this name as "model"
    source: {tiny}   # a folder, a hub id like Qwen/Qwen3-8B, or s3://BUCKET/PREFIX
    tp_degree: 8     # cores of a replica
    replicas: 2

  helpdesk:
    source: {tiny}
    tp_degree: 2
    replicas: {{min: 0, max: 3}}  # starts with the first request, and follows the load

  storyteller:
    source: {tiny}   # one replica on one core
"""

REAL = """\
# A fleet on {machine}: {cores} NeuronCores on {devices} devices, {vcpus} vCPUs.
#
#     corewright validate {name}    # check it
#     corewright plan {name}        # preview cores, memory and threads
#     corewright compile {name}     # compile ahead: minutes for small models, over an hour for the largest
#     corewright up {name}          # start the fleet; Ctrl-C stops it
#     corewright apply {name}       # change a running fleet
#
# `corewright advise HUB-ID --instance {instance}` compares degrees and batches for a model and a load.
version: 1
name: fleet

hosts: {{instance: {instance}}}

defaults:            # for all models, unless they set the field
  max_len: 4096      # tokens of one request: prompt + output
  max_batch: 8       # slots: concurrent requests of a replica
  # engine: nxd-inference                  # unset: the engine that this machine's packages serve the model with
  # neff_cache: s3://BUCKET/compiled       # share compiled graphs between machines

models:
  {chat}:
    source: {source}   # a hub id, a folder, or s3://BUCKET/PREFIX{gated}
    tp_degree: {tp}     # cores of a replica; this type supports {degrees}
    # quantize: int8   # half of the memory for weights; check the quality of the answers
"""

GATED = """
    # This one is gated: accept its license on the hub, and set HF_TOKEN to a token of that account."""

SECOND = """
  small:
    source: Qwen/Qwen2.5-0.5B-Instruct
    tp_degree: {tp}
    replicas: {{min: 0, max: {most}}}  # starts with the first request, and follows the load
"""


def spec_for(topology: Topology | None, name: str, *, here: bool = True) -> str:
    """Returns the text of a spec for a machine; None: one without Neuron devices. ``name`` is the file's. ``here``: it
    is this machine."""
    if topology is None:
        return EMULATED.format(name=name, tiny=DEMO.parent / "models" / "tiny")
    degrees = [tp for tp in DEGREES[topology.family] if tp <= topology.cores]
    first = max(tp for tp in degrees if tp <= LARGEST)
    large = topology.memory_gib >= LEAST_GIB
    text = REAL.format(
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
    second = min(tp for tp in degrees if tp > 1) if len(degrees) > 1 else 1
    left = (topology.cores - first) // second
    return text + (SECOND.format(tp=second, most=min(4, left)) if left else "")


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
