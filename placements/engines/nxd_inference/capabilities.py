"""What the engine ``nxd-inference`` can do."""

from __future__ import annotations

from placements.engines.capabilities import NEURON_INDEX, Capabilities

CAPABILITIES = Capabilities(
    engine="nxd-inference",
    runs_on="neuron",
    package="neuronx_distributed_inference",
    requires=("neuronx-distributed-inference",),
    loads=("hf", "sharded", "precompiled"),
    compiles_weights=True,
    install="AWS's Deep Learning AMI Neuron has it under /opt/aws_neuronx_venv_pytorch_*_nxd_inference (inf2 and trn1: "
    f"up to SDK 2.28; trn2: later ones too); else pip install neuronx-distributed-inference {NEURON_INDEX}",
)
