"""The continuous batcher: admits waiting requests and runs one engine step at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import cast

import msgspec

from workers.batching.accepted_request import AcceptedRequest, check_request
from workers.batching.buckets import smallest_bucket
from workers.batching.engine_steps import steps_of
from workers.batching.guidance import Guides
from workers.batching.logprobs import first_of_prompt
from workers.batching.reasoning_budget import start_budget
from workers.batching.sampling import start_sampling
from workers.batching.slots import RequestSlots
from workers.batching.step_loop import BatcherStats, StepLoop
from workers.messages.engine_protocol import BlockEngine, EngineSpec, GenerateEngine
from workers.messages.requests import FinishReason, GenerateRequest, TokenEvent
from workers.text.detokenizer import AnswerText
from workers.text.tokenizer import Tokenizer


class Batcher(StepLoop[AcceptedRequest, list[tuple[int, AcceptedRequest]]]):
    """Drives one engine for many requests.

    Any thread may ``submit``, ``cancel``, ``drain``, ``close`` and read ``stats``; one thread calls ``run`` (or, in
    tests, ``step``), and all events are emitted from that thread, one list for each step, in the order of the steps.
    Each accepted request gets exactly one event with a finish, which is its last.

    One step:
    1. Cancelled requests end, and their slots are free.
    2. When a slot is free and a request waits, the step is a prefill, except that (2a) right after a prefill every
       live request first gets a decode, so that a queue of prompts slows live requests down but never stops them; and
       (2b) an engine that is not continuous admits only when no slot is live.
       A prompt whose logprobs are requested is prefilled whole, as long as the engine scores prompts; else only its
       first token is, and each decode scores the next one, which returns the logits of every position on any engine.
       Requests join in the order of their arrival: as many as there are free slots, while (2c) the padded prompts
       together are no longer than the longest possible prompt, so that no prefill stalls the live requests for longer
       than that one would (tokens that a slot already holds do not count); or (2d) where the engine is not
       continuous, while the longest prompt and the longest answer together fit into a slot: it pads all prompts to one
       length, and all rows share a position.
    3. Otherwise the step is a decode of every live slot, sorted. Where the engine drafts, it decodes several tokens of
       each slot: plainly greedy requests get those that are the model's own choice, all others only the first. Where
       it speculates within its own step, all tokens that it returns are used.

    An engine exception in a step is fatal: the state of its KV cache is unknown, and on Neuron the runtime does not
    recover. Every request gets an ERROR event, later ones are refused with ``BatcherClosed``, and ``step`` and ``run``
    raise the exception, so that the replica's process can exit and be restarted.
    """

    def __init__(
        self,
        engine: GenerateEngine,
        tokenizer: Tokenizer,
        emit: Callable[[list[TokenEvent]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``engine`` is loaded. ``emit`` is called without any lock held; an exception of it ends the batcher."""
        super().__init__(emit, clock)
        self._engine = engine
        self._spec = engine.spec
        self._tokenizer = tokenizer
        self._engine_steps = steps_of(engine, tokenizer.token_bytes)
        self._guides = Guides(tokenizer, self._spec.vocab_size, self._spec.eos_token_ids)
        shared = cast(BlockEngine, engine).prefixes if self._spec.shares_blocks else None
        self._slots = RequestSlots(self._spec, shared)  # guarded by ``_changed``, like all below
        self._waiting: deque[AcceptedRequest] = deque()
        self._just_prefilled = False
        self._prefilling = 0

    def submit(self, request: GenerateRequest) -> None:
        """Accept a request. Raises ValueError for one that can never run, and ``BatcherClosed``."""
        if self._spec.run_k and request.temperature_is_default:
            request = msgspec.structs.replace(request, temperature=0.0)
        check_request(request, self._spec)
        accepted = self._start(request)
        with self._changed:
            self._accept(request.id, accepted)
            self._waiting.append(accepted)

    def warm_guides(self) -> None:
        """Load the vocabulary for guided decoding ahead of time: seconds for a large one. Any thread may call this."""
        if self._spec.returns == "logits":
            self._guides.warm()

    @property
    def spec(self) -> EngineSpec:
        """The engine's limits."""
        return self._spec

    @property
    def stats(self) -> BatcherStats:
        with self._changed:
            return self._stats(
                slots=len(self._slots),
                live=self._live_count,
                waiting=len(self._waiting),
                prefilling=self._prefilling,
                accepted=self._engine_steps.accepted,
                drafted=self._engine_steps.drafted,
                prefix_queries=self._slots.queries,
                prefix_hits=self._slots.hits,
            )

    def _start(self, request: GenerateRequest) -> AcceptedRequest:
        """Returns the state of a new request. Raises ValueError for an unsupported schema or stop string."""
        guide = None if request.guide is None else self._guides.start(request.guide)
        ending_ids = frozenset(request.stop_token_ids)
        if guide is not None:  # its EOS completes the value, so ignore_eos does not apply
            ending_ids |= guide.eos_ids
        elif not request.ignore_eos:
            ending_ids |= self._spec.eos_token_ids
        budget = start_budget(request, self._tokenizer)
        stream = self._tokenizer.stream(request.prompt_ids, request.skip_special_tokens)
        accepted = AcceptedRequest(
            request,
            AnswerText(stream, request.stop, request.min_tokens),
            start_sampling(request, ending_ids, guide, budget) if self._spec.returns == "logits" else None,
            ending_ids,
        )
        if request.prompt_logprobs is not None:
            accepted.prompt_logprobs.append(first_of_prompt(request.prompt_ids[0], self._tokenizer.token_bytes))
            if not self._spec.scores_prompts:
                accepted.read = 1
        return accepted

    @property
    def _live_count(self) -> int:
        return len(self._accepted) - len(self._waiting)

    def _end_cancelled(self) -> list[TokenEvent]:
        """Step 1."""
        if not self._cancelled:
            return []
        events = [self._accepted.pop(request_id).end(FinishReason.CANCELLED) for request_id in self._cancelled]
        self._waiting = deque(s for s in self._waiting if s.request.id not in self._cancelled)
        for slot, accepted in self._slots.live():
            if accepted.request.id in self._cancelled:
                self._slots.leave(slot, FinishReason.CANCELLED)
        self._cancelled.clear()
        return events

    def _end_all(self, error: str) -> list[TokenEvent]:
        events = [accepted.end(FinishReason.ERROR, error) for accepted in self._accepted.values()]
        for slot, _ in self._slots.live():
            self._slots.leave(slot, FinishReason.ERROR)
        self._accepted.clear()
        self._waiting.clear()
        self._cancelled.clear()
        self._prefilling = 0
        return events

    def _wait_s(self) -> float | None:
        return 0.0 if self._accepted or self._closing else None

    def _next_work(self) -> list[tuple[int, AcceptedRequest]]:
        """Returns the rows of the next step, sorted by slot."""
        joining = self._admit()
        self._prefilling = len(joining)
        return joining or self._slots.live()

    def _describe(self, rows: list[tuple[int, AcceptedRequest]]) -> str:
        return f"a {'prefill' if self._prefilling else 'decode'} of {len(rows)} slots"

    def _admit(self) -> list[tuple[int, AcceptedRequest]]:
        """Step 2: returns the requests that join now with their slots, sorted by slot; empty for no prefill."""
        if not self._waiting:
            return []
        if (self._just_prefilled or not self._spec.continuous) and self._live_count:  # 2a, 2b
            return []
        joining: list[tuple[int, AcceptedRequest]] = []
        prompt = answer = 0  # the longest of those that join
        while self._waiting and self._slots.free_count:
            accepted = self._waiting[0]
            request, reuse = accepted.request, self._slots.place(accepted)
            scored = len(request.prompt_ids) - accepted.read  # in steps of their own
            prompt, answer = max(prompt, accepted.read - accepted.start), max(answer, scored + request.max_tokens)
            if joining and not self._join_fits(len(joining) + 1, prompt, answer):
                break
            joining.append((self._slots.join(accepted, reuse), self._waiting.popleft()))
        return sorted(joining, key=lambda row: row[0])

    def _join_fits(self, count: int, prompt: int, answer: int) -> bool:
        """2c, 2d: whether ``count`` requests may join together; the lengths are those of the longest one."""
        if not self._spec.continuous:
            return prompt + answer <= self._spec.max_len
        buckets = self._spec.prefill_buckets
        return count * smallest_bucket(buckets, prompt) <= buckets[-1]

    def _run_engine(self, rows: list[tuple[int, AcceptedRequest]]) -> list[TokenEvent]:
        """Steps 2 and 3: call the engine for ``rows``.

        Returns an event for each, after those with the logprobs of its prompt."""
        is_prefill = self._prefilling > 0
        slots, members = [slot for slot, _ in rows], [accepted for _, accepted in rows]
        if is_prefill:
            events = self._engine_steps.prefill(slots, members, self._slots.copies)
        else:
            events = self._engine_steps.decode(slots, members)
        with self._changed:
            for slot, accepted, event in zip(slots, members, events, strict=True):
                if event.finish is not None:
                    self._slots.leave(slot, event.finish)
                    del self._accepted[accepted.request.id]
                    self._cancelled.discard(accepted.request.id)
                elif is_prefill:
                    self._slots.prefilled(slot, accepted)
            self._just_prefilled = is_prefill
            self._steps += 1
            self._tokens += sum(len(event.token_ids) for event in events)
            self._prefilling = 0
            self._step_started_at = None
        if is_prefill or self._engine_steps.scored:
            self._engine_steps.scored = False
            events = [part for row, event in zip(members, events, strict=True) for part in row.with_prompt(event)]
        return events
