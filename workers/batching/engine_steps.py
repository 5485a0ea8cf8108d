"""The steps of an engine for accepted requests: one call for all rows, and an event for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from workers.batching import sampling
from workers.batching.accepted_request import AcceptedRequest
from workers.batching.logprobs import prompt_logprobs, token_logprobs
from workers.messages.engine_protocol import (
    DraftingEngine,
    GenerateEngine,
    PrefixEngine,
    RunEngine,
    SamplingEngine,
    ScoringEngine,
)
from workers.messages.requests import TokenEvent, TokenLogprobs


def agreed(logits: Any, drafts: Sequence[Sequence[int]]) -> list[list[int | None]]:
    """Returns the model's own tokens for each row of ``logits`` ``[len(drafts), k + 1, vocab_size]`` float32.

    A row has 1 to k + 1 tokens: the correct guesses, and the model's own token after the last of them. None, which
    ends a row, stands for logits that are not finite.
    """
    best = logits.argmax(dim=-1)
    finite = logits.gather(-1, best[..., None])[..., 0].isfinite().tolist()  # NaN and +inf count as largest
    runs: list[list[int | None]] = []
    for tokens, usable, guesses in zip(best.tolist(), finite, drafts, strict=True):
        run: list[int | None] = []
        for index, (token, ok) in enumerate(zip(tokens, usable, strict=True)):
            run.append(token if ok else None)
            if not ok or index == len(guesses) or token != guesses[index]:
                break
        runs.append(run)
    return runs


Rows = Sequence[AcceptedRequest]
TokenBytes = Callable[[int], bytes]


class EngineSteps:
    """An engine that generates one token of each slot in a step. Calls come from one thread."""

    def __init__(self, engine: GenerateEngine, token_bytes: TokenBytes) -> None:
        """``engine`` is loaded. ``token_bytes``: see ``Tokenizer.token_bytes``."""
        self.drafted = 0  # tokens proposed by a draft since the start
        self.accepted = 0  # of these, those that the model agreed with
        self.scored = False  # a step has scored a token of a prompt; its reader sets it back
        self._engine = engine
        self._spec = engine.spec
        self._token_bytes = token_bytes
        self._sampling = cast(SamplingEngine, engine) if self._spec.device_top_k else None
        self._prefixes = cast(PrefixEngine, engine) if self._spec.prefix_block else None

    def prefill(self, slots: Sequence[int], rows: Rows, copies: list[tuple[int, int, int]]) -> list[TokenEvent]:
        """Processes the prompts, from where each slot's reusable prefix ends. Makes the ``copies`` before, and clears
        them."""
        scored = [index for index, row in enumerate(rows) if row.request.prompt_logprobs is not None]
        if scored and self._spec.scores_prompts:
            others = [index for index in range(len(rows)) if index not in scored]
            events: dict[int, TokenEvent] = {}
            if others:  # first, for the copies: a slot that is copied from may be one of ``scored``
                made = self.prefill([slots[index] for index in others], [rows[index] for index in others], copies)
                events.update(zip(others, made, strict=True))
            made = self._score([slots[index] for index in scored], [rows[index] for index in scored])
            events.update(zip(scored, made, strict=True))
            return [events[index] for index in range(len(rows))]
        if self._sampling is not None:
            max_ids = self._spec.device_top_k
            self._sampling.sample_by(slots, [sampling.on_device(row.request, max_ids) for row in rows])
        prompts, starts = [row.prompt for row in rows], [row.start for row in rows]
        if self._prefixes is None or not any(starts):
            return self._advanced(rows, self._engine.prefill(slots, prompts))
        # In the order of admission: a slot that is copied from may be overwritten by a later prefill.
        for source, slot, count in copies:
            self._prefixes.copy_prefix(source, slot, count)
        copies.clear()
        return self._advanced(rows, self._prefixes.prefill_from(slots, prompts, starts))

    def _score(self, slots: Sequence[int], rows: Rows) -> list[TokenEvent]:
        """Processes whole prompts, and keeps the logprobs of their tokens in ``rows``."""

        def read(index: int, ids: Sequence[int], logits: Any) -> None:
            row = rows[index]
            row.prompt_logprobs += prompt_logprobs(logits, ids, row.request.prompt_logprobs or 0, self._token_bytes)

        prompts = [row.request.prompt_ids for row in rows]
        return self._advanced(rows, cast(ScoringEngine, self._engine).score(slots, prompts, read))

    def decode(self, slots: Sequence[int], rows: Rows) -> list[TokenEvent]:
        output = self._engine.decode(slots, [row.last_token for row in rows], [row.position for row in rows])
        return self._advanced(rows, output)

    def _advanced(self, rows: Rows, output: Any) -> list[TokenEvent]:
        return [row.advance(*choice) for row, choice in zip(rows, self._chosen(output, rows), strict=True)]

    def _chosen(self, output: Any, rows: Rows) -> Sequence[tuple[int | None, TokenLogprobs | None]]:
        """Returns the next token of each of ``rows``, and its logprobs where requested."""
        if self._spec.returns == "tokens":
            return [(token, None) for token in output]
        if scored := [index for index, row in enumerate(rows) if row.scores]:
            return self._with_scored(output, rows, scored)
        tokens = sampling.sample(output, [row.sampler for row in rows if row.sampler is not None])
        counts = [row.request.logprobs for row in rows]
        return list(zip(tokens, token_logprobs(output, tokens, counts, self._token_bytes), strict=True))

    def _with_scored(
        self, output: Any, rows: Rows, scored: Sequence[int]
    ) -> Sequence[tuple[int | None, TokenLogprobs | None]]:
        """Does the same where the logits of the rows ``scored`` are those of the next token of their prompts."""
        self.scored = True
        choices: dict[int, tuple[int | None, TokenLogprobs | None]] = {}
        for index in scored:
            row = rows[index]
            token, count = row.request.prompt_ids[row.read], row.request.prompt_logprobs or 0
            (item,) = prompt_logprobs(output[index : index + 1], [token], count, self._token_bytes)
            row.prompt_logprobs.append(item)
            choices[index] = (token, None)
        others = [index for index in range(len(rows)) if index not in choices]
        if others:
            choices.update(zip(others, self._chosen(output[others], [rows[index] for index in others]), strict=True))
        return [choices[index] for index in range(len(rows))]

    def _count(self, guesses: int, runs: Sequence[Sequence[int | None]]) -> None:
        """Counts so many guesses for each of ``runs``. ``accepted`` comes last: it is never seen beyond ``drafted``."""
        self.drafted += guesses * len(runs)
        self.accepted += sum(len(run) - 1 for run in runs)

    def _room(self, rows: Rows) -> int:
        """Returns how many tokens beyond the next one fit into every slot."""
        return min(self._spec.max_len - 1 - row.position for row in rows)


class DraftingSteps(EngineSteps):
    """An engine with a draft: plainly greedy requests get the guesses that are the model's own choice, all others only
    the first token."""

    def __init__(self, engine: DraftingEngine, token_bytes: TokenBytes) -> None:
        super().__init__(engine, token_bytes)
        self._drafting = engine

    def decode(self, slots: Sequence[int], rows: Rows) -> list[TokenEvent]:
        greedy = [index for index, row in enumerate(rows) if row.is_plainly_greedy]
        ahead = self._draft_length(rows, greedy)
        if not ahead:
            return super().decode(slots, rows)
        sampled = [index for index in range(len(rows)) if index not in greedy]
        positions = [row.position for row in rows]
        # An engine that loses the KV cache of unlisted slots needs guesses for all of them, also unused ones.
        drafted = greedy if self._spec.keeps_idle_slots else list(range(len(rows)))
        guesses = self._drafting.draft(
            [slots[index] for index in drafted],
            [rows[index].last_two for index in drafted],
            [positions[index] for index in drafted],
            ahead,
        )
        by_row = dict(zip(drafted, guesses, strict=True))
        tokens = [[row.last_token, *by_row.get(index, [0] * ahead)] for index, row in enumerate(rows)]
        logits = self._drafting.verify(slots, tokens, positions)
        runs = agreed(logits[greedy], [by_row[index] for index in greedy])
        self._count(ahead, runs)
        events = {index: rows[index].advance_all(run) for index, run in zip(greedy, runs, strict=True)}
        if sampled:
            events |= zip(sampled, self._advanced([rows[index] for index in sampled], logits[sampled, 0]), strict=True)
        return [events[index] for index in range(len(rows))]

    def _draft_length(self, rows: Rows, greedy: Sequence[int]) -> int:
        """Returns the number of tokens to draft; 0 for an ordinary decode.

        It is 0 where no plainly greedy request needs more than one token, and at most what fits into every slot. A
        request that needs n tokens has room for n, so a greedy one gets its drafts in every step, as engines require.
        """
        lengths = [rows[index].request.max_tokens - rows[index].produced - 1 for index in greedy]
        return min(self._spec.draft_k, self._room(rows), max(lengths, default=0))


class RunSteps(EngineSteps):
    """An engine that speculates within its own step: all tokens that it returns are used."""

    def __init__(self, engine: RunEngine, token_bytes: TokenBytes) -> None:
        super().__init__(engine, token_bytes)
        self._running = engine

    def decode(self, slots: Sequence[int], rows: Rows) -> list[TokenEvent]:
        if self._room(rows) < self._spec.run_k:
            return super().decode(slots, rows)
        runs = self._running.decode_runs(slots, [row.last_token for row in rows], [row.position for row in rows])
        self._count(self._spec.run_k, runs)
        return [row.advance_all(run) for row, run in zip(rows, runs, strict=True)]


def steps_of(engine: GenerateEngine, token_bytes: TokenBytes) -> EngineSteps:
    """Returns the steps of a loaded engine, by the abilities that its ``spec`` states."""
    if engine.spec.draft_k:
        return DraftingSteps(cast(DraftingEngine, engine), token_bytes)
    if engine.spec.run_k:
        return RunSteps(cast(RunEngine, engine), token_bytes)
    return EngineSteps(engine, token_bytes)
