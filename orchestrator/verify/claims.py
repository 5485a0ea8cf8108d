"""The claims that `corewright verify` proves or refutes, and the verdicts on them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

Part = Literal["facts", "runtime", "engines", "compiler", "memory", "faults", "pinning", "speeds"]
PARTS: tuple[Part, ...] = get_args(Part)
Result = Literal["proved", "refuted", "not run"]


class Statement(NamedTuple):
    """A statement of the documentation or code about a machine, which a measurement can refute."""

    id: str
    part: Part
    text: str


CLAIMS: Mapping[str, Statement] = MappingProxyType(
    {
        claim.id: claim
        for claim in (
            Statement("doctor", "facts", "`corewright doctor` reports no errors"),
            Statement("devices", "facts", "the machine has the devices and cores of its instance type"),
            Statement("host-memory", "facts", "the host memory is at least 95 % of that of the instance type"),
            Statement("cpu-layout", "facts", "the CPU cores and NUMA nodes are those that AWS publishes for the type"),
            Statement("open-files", "facts", "a process can open 65,536 files"),
            Statement("disk-rate", "facts", "model files are read at least at the rate that load times assume"),
            Statement("claim", "runtime", "a process can claim free cores"),
            Statement(
                "double-claim", "runtime", "a second process cannot claim these cores, and the error is recognized"
            ),
            Statement("claim-after-kill", "runtime", "the cores of a process are free within 2 s after its SIGKILL"),
            Statement(
                "degrees", "runtime", "each documented degree loads and answers on the cores that `plan` may choose"
            ),
            Statement("tokens", "engines", "greedy answers are the most probable ones by transformers in float32"),
            Statement("logprobs", "engines", "log probabilities equal those of transformers in float32"),
            Statement("bucket-edges", "engines", "greedy answers are correct one token below and above a bucket"),
            Statement("batch", "engines", "greedy answers are correct in a batch with others"),
            Statement("prefix-cache", "engines", "greedy answers are correct for prompts with a cached prefix"),
            Statement("draft", "engines", "greedy answers are correct with a draft model"),
            Statement("seed", "engines", "a sampled answer is the same with the same seed"),
            Statement("top-k-1", "engines", "sampling with top_k 1 is greedy"),
            Statement("device-sampling", "engines", "greedy answers are correct if the device samples"),
            Statement("long-prompt", "engines", "greedy answers are correct for prompts of 512 and 4,096 tokens"),
            Statement(
                "compile-killed", "compiler", "a killed compile leaves no artifacts that a start accepts as complete"
            ),
            Statement("compile-failed", "compiler", "a compile that fails is not repeated"),
            Statement("damaged-artifact", "compiler", "a damaged graph is refused or compiled again, never served"),
            Statement("host-estimate", "memory", "a replica needs no more host memory than `plan` estimates"),
            Statement("hbm-estimate", "memory", "a replica needs no more HBM than `plan` estimates"),
            Statement(
                "too-large", "faults", "a model that does not fit is refused before or during its load, with the reason"
            ),
            Statement("texts-known", "faults", "every failure that occurred is recognized"),
            Statement(
                "pinning", "pinning", "a replica decodes as fast on its planned CPUs as on all CPUs, within 10 %"
            ),
            Statement(
                "numa", "pinning", "CPUs of the replica's NUMA nodes are as fast as those of others, within 10 %"
            ),
            Statement("held-up", "pinning", "a prefill delays other slots by its own time and two steps, within 50 %"),
            Statement(
                "speeds",
                "speeds",
                "decoding steps of the spec's models take the time that `plan` estimates, within its error",
            ),
        )
    }
)
"""In the order in which they are checked and shown."""


@dataclass(frozen=True)
class Verdict:
    """The result of a claim on one subject."""

    claim: str
    result: Result
    finding: str  # what was measured, or why it was not run
    subject: str = ""  # the model, degree or engine that it was measured on; empty: the machine
    values: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def as_dict(self) -> dict[str, Any]:
        """Returns the JSON of `verify -o json`."""
        claim = CLAIMS[self.claim]
        return {
            "claim": claim.id,
            "part": claim.part,
            "subject": self.subject,
            "result": self.result,
            "finding": self.finding,
            "values": dict(self.values),
        }


def proved(claim: str, holds: bool, finding: str, subject: str = "", **values: Any) -> Verdict:
    """Returns the verdict on a claim that was measured: proved if it ``holds``, else refuted."""
    return Verdict(claim, "proved" if holds else "refuted", finding, subject, MappingProxyType(values))


def not_run(claim: str, why: str, subject: str = "") -> Verdict:
    """Returns the verdict on a claim that could not be measured."""
    return Verdict(claim, "not run", why, subject)
