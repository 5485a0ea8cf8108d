"""Releases of the Neuron SDK, and the environments of engines on AWS's machine images, from neuron_sdks.csv and
neuron_environments.csv. A value that no source states is empty.

Sources, by the first word of an entry: ``sdk`` is aws-neuron/aws-neuron-sdk (src/helperscripts/n2-manifest.json,
release-notes/, and the page about DLAMIs), ``nxdi`` aws-neuron/neuronx-distributed-inference (setup.py), ``dlc``
aws-neuron/deep-learning-containers (README.md), each with a commit or tag, and ``docs`` AWS's Neuron documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from placements.facts.tables import read_table
from placements.facts.versions import order, series

CONTAINERS = "public.ecr.aws/neuron/pytorch-inference-neuronx"
VLLM_CONTAINERS = "public.ecr.aws/neuron/pytorch-inference-vllm-neuronx"


@dataclass(frozen=True)
class Sdk:
    """A release of the Neuron SDK, with the versions of its packages."""

    sdk: str  # "2.28.1"
    released: str  # "2026-03-13"
    neuronx_cc: str
    torch_neuronx: str  # without the version of torch that stands before it: "2.12.22436" in 2.9.0.2.12.22436
    nxd_inference: str
    transformers_neuronx: str  # after 2.25 in no image, only in AWS's package index
    transformers: str  # the series that NxD Inference requires
    container: str  # tag in CONTAINERS
    vllm_container: str  # tag in VLLM_CONTAINERS
    source: str

    @property
    def series(self) -> str:
        """ "2.28"."""
        return series(self.sdk)

    @property
    def packages(self) -> Mapping[str, str]:
        """The stated versions of the compiler and NxD Inference: distribution -> version. A patch without stated
        versions has those of its series."""
        alike = (other for other in reversed(SDKS) if other.series == self.series and other.neuronx_cc)
        stated = self if self.neuronx_cc else next(alike, self)
        versions = {"neuronx-cc": stated.neuronx_cc, "neuronx-distributed-inference": stated.nxd_inference}
        return {name: version for name, version in versions.items() if version}

    @property
    def superseded(self) -> str:
        """The day from which its images and containers get no updates: the day of the next release; "" if it is the
        newest (AWS's maintenance policy, about-neuron/sdk-policy.rst: updates are not applied to older images)."""
        return next((other.released for other in SDKS if order(other.sdk) > order(self.sdk)), "")


@dataclass(frozen=True)
class Environment:
    """A virtual environment with an engine on AWS's multi-framework image of an operating system."""

    first: str  # the first release of the SDK whose image has it
    last: str  # the last one
    os: str  # "Ubuntu 24.04"
    engine: str
    path: str
    python: str  # "3.12"
    torch: str
    vllm: str  # the version of vLLM, if that is the engine
    support_ended: str  # the day on which AWS ended the support of its engine, Python or OS; "": it is supported
    source: str

    @property
    def image(self) -> str:
        """The name of the images, which a build date follows."""
        return f"Deep Learning AMI Neuron ({self.os})"

    @property
    def parameter(self) -> str:
        """The SSM parameter of the newest image of this name, which may be of a later SDK."""
        return f"/aws/service/neuron/dlami/multi-framework/{self.os.lower().replace(' ', '-')}/latest/image_id"

    def version_in(self, sdk: Sdk) -> str:
        """Returns the version of the engine's package in a release; of vLLM where vLLM is the engine."""
        return self.vllm or str(getattr(sdk, self.engine.replace("-", "_")))

    def container_in(self, sdk: Sdk) -> str:
        """Returns the container image of a release with the same engine; "" without one."""
        tag = sdk.vllm_container if self.vllm else sdk.container
        return f"{VLLM_CONTAINERS if self.vllm else CONTAINERS}:{tag}" if tag else ""


SDKS: tuple[Sdk, ...] = tuple(Sdk(**row) for row in read_table("facts/neuron_sdks.csv"))
"""Oldest first."""

ENVIRONMENTS: tuple[Environment, ...] = tuple(Environment(**row) for row in read_table("facts/neuron_environments.csv"))
"""The preferred operating system first."""


def sdk_named(name: str) -> Sdk | None:
    """Returns a release ("2.28.0"), or the last one of a series ("2.28"); None: not in the table."""
    return next((sdk for sdk in reversed(SDKS) if name in (sdk.sdk, sdk.series)), None)


def next_series(sdk: Sdk) -> Sdk | None:
    """Returns the first release of the series after that of a release."""
    return next((other for other in SDKS if order(other.series) > order(sdk.series)), None)


def environments_on(sdk: Sdk) -> tuple[Environment, ...]:
    """Returns the environments of all images of a release."""
    return tuple(item for item in ENVIRONMENTS if order(item.first) <= order(sdk.sdk) <= order(item.last))


def sdk_of(packages: Mapping[str, str]) -> str | None:
    """Returns the series of the SDK that installed distributions are of; None: unknown.

    Each series has one of the compiler. Without the compiler, the version of NxD Inference decides.
    """
    compiler, nxd = packages.get("neuronx-cc"), packages.get("neuronx-distributed-inference")
    matches = [sdk.series for sdk in SDKS if compiler and sdk.neuronx_cc and series(sdk.neuronx_cc) == series(compiler)]
    matches = matches or [sdk.series for sdk in SDKS if nxd and sdk.nxd_inference == nxd.split("+")[0]]
    return matches[0] if matches else None
