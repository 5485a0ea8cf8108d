"""Traffic whose prompts continue earlier prompts and answers, for engines that reuse prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.workers.batching.test_batcher import Received, request, run_out
from workers.batching.batcher import Batcher
from workers.engines.echo.engine import echo_tokens
from workers.messages.requests import FinishReason
from workers.text.tokenizer import ByteTokenizer


class PrefixTraffic(RuleBasedStateMachine):
    """Requests arrive, continue others and leave at any time; each answer is that of its whole prompt."""

    longest = 50  # tokens of a prompt

    def serve(self, engine: Any) -> None:
        """``engine`` is an echo engine that counts the tokens of prompts that it has ``read`` and ``saved``."""
        self.engine = engine
        self.received = Received()
        self.batcher = Batcher(engine, ByteTokenizer(), self.received)
        self.prompts: list[Sequence[int]] = []

    @rule(
        base=st.integers(0, 40),
        cut=st.integers(0, 60),
        more=st.lists(st.integers(0, 2), min_size=1, max_size=12),
        n=st.integers(1, 10),
    )
    def submit(self, base: int, cut: int, more: list[int], n: int) -> None:
        beginning: list[int] = []
        if base < len(self.prompts):
            beginning = [*self.prompts[base], *self.received.ids(str(base))][:cut]
        prompt = [*beginning, *more][: self.longest]
        self.batcher.submit(request(str(len(self.prompts)), prompt, n))
        self.prompts.append(prompt)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.batcher.step()

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.batcher.cancel(str(data.draw(st.integers(0, len(self.prompts) - 1))))

    @invariant()
    def saved_tokens_are_counted(self) -> None:
        stats, engine = self.batcher.stats, self.engine
        assert (stats.prefix_hits, stats.prefix_queries) == (engine.saved, engine.saved + engine.read)

    def teardown(self) -> None:
        if not hasattr(self, "batcher"):  # it ended before its first rule
            return
        run_out(self.batcher)
        for number, prompt in enumerate(self.prompts):
            got, ended = self.received.ids(str(number)), self.received.finish(str(number))
            assert got == echo_tokens(prompt, len(got))
            assert ended in (FinishReason.LENGTH, FinishReason.CANCELLED)
