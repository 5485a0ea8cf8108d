"""The claims that `corewright verify` proves or refutes, and the verdicts on them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

Part = Literal["facts", "runtime", "engines", "compiler", "memory", "faults", "pinning", "speeds"]
Result = Literal["proved", "refuted", "not run"]


class Claim(NamedTuple):
    """A statement of our documentation or code about a machine, which a measurement can refute."""

    id: str
    part: Part
    text: str


CLAIMS: Mapping[str, Claim] = MappingProxyType(
    {
        claim.id: claim
        for claim in (
            Claim("doctor", "facts", "`corewright doctor` finds no problem"),
            Claim("devices", "facts", "the machine has the devices and cores of its instance type"),
            Claim("host-memory", "facts", "its host memory is at least 95 % of the instance type's"),
            Claim("open-files", "facts", "a process may open 65,536 files"),
            Claim("disk-rate", "facts", "model files are read at the rate that load times assume"),
            Claim("claim", "runtime", "a process can claim free cores"),
            Claim("double-claim", "runtime", "a second process is refused these cores, with a text that is recognized"),
            Claim("claim-after-kill", "runtime", "the cores of a process are free within 2 s after its SIGKILL"),
            Claim("degrees", "runtime", "each documented degree loads and answers on the cores that `plan` may choose"),
            Claim("tokens", "engines", "greedy answers are the most probable ones by transformers in float32"),
            Claim("logprobs", "engines", "log probabilities are those of transformers in float32"),
            Claim("bucket-edges", "engines", "prompts one token shorter and longer than a bucket change no answer"),
            Claim("batch", "engines", "an answer is the same alone and beside others"),
            Claim("prefix-cache", "engines", "an answer is the same after a prompt with the same beginning"),
            Claim("draft", "engines", "an answer is the same with a draft model"),
            Claim("seed", "engines", "a sampled answer is the same with the same seed"),
            Claim("top-k-1", "engines", "sampling with top_k 1 is greedy"),
            Claim("long-prompt", "engines", "prompts of 512 and 4,096 tokens are answered as transformers does"),
            Claim("compile-killed", "compiler", "a killed compile leaves nothing that a start takes for complete"),
            Claim("compile-failed", "compiler", "a compile that fails is not repeated"),
            Claim("host-estimate", "memory", "a replica needs no more host memory than `plan` says"),
            Claim("hbm-estimate", "memory", "a replica needs no more HBM than `plan` says"),
            Claim("too-large", "faults", "a model that does not fit is refused before or by its load, with the reason"),
            Claim(
                "damaged-artifact", "faults", "a damaged compiled artifact is refused or compiled again, never served"
            ),
            Claim("texts-known", "faults", "every failure that was seen has an id of its own"),
            Claim("pinning", "pinning", "a replica on its planned CPUs decodes as fast as one on all, within 10 %"),
            Claim("held-up", "pinning", "a prefill holds other slots up for its own time and two steps, within 50 %"),
            Claim(
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
