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
    """A statement of our documentation or code about a machine, which a measurement can refute."""

    id: str
    part: Part
    text: str


CLAIMS: Mapping[str, Statement] = MappingProxyType(
    {
        claim.id: claim
        for claim in (
            Statement("doctor", "facts", "`corewright doctor` finds no problem"),
            Statement("devices", "facts", "the machine has the devices and cores of its instance type"),
            Statement("host-memory", "facts", "its host memory is at least 95 % of the instance type's"),
            Statement("cpu-layout", "facts", "its CPU cores and NUMA nodes are those that AWS publishes for its type"),
            Statement("open-files", "facts", "a process may open 65,536 files"),
            Statement("disk-rate", "facts", "model files are read at the rate that load times assume"),
            Statement("claim", "runtime", "a process can claim free cores"),
            Statement(
                "double-claim", "runtime", "a second process is refused these cores, with a text that is recognized"
            ),
            Statement("claim-after-kill", "runtime", "the cores of a process are free within 2 s after its SIGKILL"),
            Statement(
                "degrees", "runtime", "each documented degree loads and answers on the cores that `plan` may choose"
            ),
            Statement("tokens", "engines", "greedy answers are the most probable ones by transformers in float32"),
            Statement("logprobs", "engines", "log probabilities are those of transformers in float32"),
            Statement("bucket-edges", "engines", "so are those to prompts one token shorter and longer than a bucket"),
            Statement("batch", "engines", "so are answers beside others in a batch"),
            Statement("prefix-cache", "engines", "so are answers to prompts whose beginning is cached"),
            Statement("draft", "engines", "so are answers with a draft model"),
            Statement("seed", "engines", "a sampled answer is the same with the same seed"),
            Statement("top-k-1", "engines", "sampling with top_k 1 is greedy"),
            Statement("device-sampling", "engines", "so are greedy answers that the device samples"),
            Statement("long-prompt", "engines", "so are answers to prompts of 512 and 4,096 tokens"),
            Statement("compile-killed", "compiler", "a killed compile leaves nothing that a start takes for complete"),
            Statement("compile-failed", "compiler", "a compile that fails is not repeated"),
            Statement("damaged-artifact", "compiler", "a damaged graph is refused or compiled again, never served"),
            Statement("host-estimate", "memory", "a replica needs no more host memory than `plan` says"),
            Statement("hbm-estimate", "memory", "a replica needs no more HBM than `plan` says"),
            Statement(
                "too-large", "faults", "a model that does not fit is refused before or by its load, with the reason"
            ),
            Statement("texts-known", "faults", "every failure that was seen has an id of its own"),
            Statement("pinning", "pinning", "a replica on its planned CPUs decodes as fast as on all, within 10 %"),
            Statement("numa", "pinning", "CPUs of the replica's own NUMA nodes are as fast as others, within 10 %"),
            Statement(
                "held-up", "pinning", "a prefill holds other slots up for its own time and two steps, within 50 %"
            ),
            Statement(
                "speeds", "speeds", "decoding steps of the spec's models take what `plan` estimates, within its error"
            ),
        )
    }
)
"""In the order in which they are checked and shown."""


@dataclass(frozen=True)
class Verdict:
    """What was found about a claim."""

    claim: str
    result: Result
    found: str  # what was measured, or why it was not run
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
            "found": self.found,
            "values": dict(self.values),
        }


def proved(claim: str, holds: bool, found: str, subject: str = "", **values: Any) -> Verdict:
    """Returns a verdict by whether the claim held."""
    return Verdict(claim, "proved" if holds else "refuted", found, subject, MappingProxyType(values))


def not_run(claim: str, why: str, subject: str = "") -> Verdict:
    """Returns the verdict on a claim that could not be measured."""
    return Verdict(claim, "not run", why, subject)
