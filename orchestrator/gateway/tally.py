"""What one gateway counts of a model's demand, from one report to the controller to the next."""

from __future__ import annotations

from orchestrator.demand import Demand, RoutingDecision


class Tally:
    """Counts since the last ``take``. Plain attributes: whoever counts adds to them."""

    __slots__ = (
        "arrived",
        "cold",
        "decision",
        "ended",
        "first_tokens",
        "late",
        "output_tokens",
        "prefill_s",
        "prompt_tokens",
        "refused",
        "slot_s",
    )

    def __init__(self) -> None:
        self.decision: RoutingDecision | None = None  # the first since the last report, for the events
        self._reset()

    def _reset(self) -> None:
        self.arrived = self.cold = self.refused = self.ended = 0
        self.prompt_tokens = self.output_tokens = 0
        self.slot_s = self.prefill_s = 0.0
        self.first_tokens = self.late = 0

    def take(self, model: str, *, waiting: int, live: int, longest_wait_s: float) -> Demand:
        """The counts, which begin anew, and what is there now."""
        told = Demand(
            model=model,
            arrived=self.arrived,
            cold=self.cold,
            refused=self.refused,
            ended=self.ended,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            slot_s=self.slot_s,
            first_tokens=self.first_tokens,
            prefill_s=self.prefill_s,
            late=self.late,
            waiting=waiting,
            live=live,
            longest_wait_s=longest_wait_s,
        )
        self._reset()
        self.decision = None
        return told
