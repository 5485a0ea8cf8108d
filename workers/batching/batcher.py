"""The continuous batcher: admits waiting requests and runs one engine step at a time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from workers.batching import sampling
from workers.batching.buckets import smallest_bucket
from workers.batching.guidance import Guides
from workers.batching.logprobs import token_logprobs
from workers.batching.penalties import changes_choice
from workers.batching.slot_prefixes import Reuse, SlotPrefixes
from workers.batching.slots import Slots
from workers.batching.speculation import agreed
from workers.messages.engine_protocol import DraftingEngine, GenerateEngine, PrefixEngine, RunEngine, SamplingEngine
from workers.messages.requests import FinishReason, GenerateRequest, TokenEvent, TokenLogprobs
from workers.text.detokenizer import AnswerText
from workers.text.tokenizer import Tokenizer


class BatcherClosed(RuntimeError):
    """The batcher accepts no more requests: it is draining, closed, or its engine failed. Not the client's fault."""


@dataclass(frozen=True)
class BatcherStats:
    """A snapshot of the batcher. Times are those of its clock, in seconds."""

    slots: int
    live: int  # requests that own a slot
    waiting: int  # accepted requests without a slot
    prefilling: int  # live requests whose prompt is in the current step
    steps: int  # prefills and decodes since the start
    tokens: int  # tokens produced since the start
    step_started_at: float | None  # start of the current step; None between steps
    last_step_at: float | None  # end of the last step
    draining: bool
    failed: str | None  # why the engine cannot go on
    drafted: int = 0  # tokens guessed by a draft model since the start
    accepted: int = 0  # of these, those that the model agreed with
    prefix_queries: int = 0  # prompt tokens looked up in the slots' KV caches since the start
    prefix_hits: int = 0  # of these, those found there and not processed again


@dataclass(eq=False)
class _Sequence:
    """An accepted request and its progress."""

    request: GenerateRequest
    answer: AnswerText
    sampler: sampling.Sampling | None  # None where the engine samples
    ending_ids: frozenset[int]  # not before min_tokens
    produced: int = 0
    last_token: int = -1
    token_before_last: int = -1
    ids: list[int] = field(default_factory=list)  # of the answer
    start: int = 0  # prompt tokens that the slot already holds before the prefill

    @property
    def last_two(self) -> tuple[int, int]:
        """The tokens at the last two positions; before the second answer token, the first is the prompt's last."""
        return self.token_before_last, self.last_token

    @property
    def is_plainly_greedy(self) -> bool:
        """Returns whether every token is just the argmax of the logits. Constant for the life of the request."""
        sampler = self.sampler
        if (
            sampler is None
            or sampler.generator is not None
            or sampler.penalties is not None
            or sampler.guide is not None
        ):
            return False
        return self.request.logprobs is None

    @property
    def position(self) -> int:
        """The number of tokens in the slot's KV cache: all but the last, which the next decode writes there."""
        return len(self.request.prompt_ids) + self.produced - 1

    @property
    def is_complete(self) -> bool:
        """Returns whether the guide allows no further token."""
        return self.sampler is not None and self.sampler.guide is not None and self.sampler.guide.ended

    def advance(self, token: int | None, logprobs: TokenLogprobs | None = None) -> TokenEvent:
        """Append the engine's next token. Returns the client's event, with a finish if the answer ends."""
        request = self.request
        if token is None:
            if self.sampler is None:
                return self.end(FinishReason.ERROR, "the engine returned no token")
            by_guide = self.sampler.guide is not None and self.sampler.guide.error is not None  # the client's schema
            return self.end(FinishReason.INVALID if by_guide else FinishReason.ERROR, self.sampler.error)
        self.token_before_last = self.last_token if self.produced else request.prompt_ids[-1]
        self.produced += 1
        self.last_token = token
        self.ids.append(token)
        text: str
        finish: FinishReason | None
        if token in self.ending_ids and (self.produced > request.min_tokens or self.is_complete):
            text, finish = self.answer.finish(), FinishReason.STOP
        else:
            text, finish = self._grow(token)
        return TokenEvent(
            id=request.id,
            text=text,
            token_ids=[token],
            logprobs=[] if logprobs is None else [logprobs],
            finish=finish,
        )

    def advance_all(self, tokens: Sequence[int | None]) -> TokenEvent:
        """Like ``advance``, for as many of ``tokens`` as the answer takes; returns one event for all."""
        events = []
        for token in tokens:
            events.append(self.advance(token))
            if events[-1].finish is not None:
                break
        return TokenEvent(
            id=self.request.id,
            text="".join(event.text for event in events),
            token_ids=[id for event in events for id in event.token_ids],
            finish=events[-1].finish,
            error=events[-1].error,
        )

    def _grow(self, token: int) -> tuple[str, FinishReason | None]:
        """Returns the text that ``token`` adds, and the finish if the answer ends for another reason than its id."""
        text = self.answer.push(token)
        if self.answer.stopped:
            return text, FinishReason.STOP
        if self.is_complete:
            return text + self.answer.finish(), FinishReason.STOP
        if self.produced >= self.request.max_tokens:
            text += self.answer.finish()
            return text, FinishReason.STOP if self.answer.stopped else FinishReason.LENGTH
        return text, None

    def end(self, finish: FinishReason, error: str | None = None) -> TokenEvent:
        return TokenEvent(id=self.request.id, finish=finish, error=error)


class Batcher:
    """Drives one engine for many requests.

    Any thread may ``submit``, ``cancel``, ``drain``, ``close`` and read ``stats``; one thread calls ``run`` (or, in
    tests, ``step``), and all events are emitted from that thread, one list for each step, in the order of the steps.
    Each accepted request gets exactly one event with a finish, which is its last.

    One step:
    1. Cancelled requests end, and their slots are free.
    2. When a slot is free and a request waits, the step is a prefill, except that (2a) right after a prefill every
       live request first gets a decode, so that a queue of prompts slows live requests down but never stops them; and
       (2b) an engine that is not continuous admits only when no slot is live.
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
        self._engine = engine
        self._spec = engine.spec
        self._tokenizer = tokenizer
        self._emit = emit
        self._clock = clock
        self._drafting = cast(DraftingEngine, engine) if self._spec.draft_k else None
        self._sampling = cast(SamplingEngine, engine) if self._spec.device_top_k else None
        self._running = cast(RunEngine, engine) if self._spec.run_k else None
        self._continuing = cast(PrefixEngine, engine) if self._spec.prefix_block else None
        self._guides = Guides(tokenizer, self._spec.vocab_size, self._spec.eos_token_ids)
        self._changed = threading.Condition()  # guards all below
        self._slots: Slots[_Sequence] = Slots(self._spec.slots)
        self._prefixes = SlotPrefixes(self._spec.slots, self._spec.prefix_block) if self._continuing else None
        self._copies: list[tuple[int, int, int]] = []  # source, slot and tokens; made before the next prefill
        self._waiting: deque[_Sequence] = deque()
        self._accepted: dict[str, _Sequence] = {}
        self._cancelled: set[str] = set()
        self._draining = False
        self._closing = False
        self._failed: str | None = None
        self._stepping = False
        self._just_prefilled = False
        self._prefilling = 0
        self._steps = 0
        self._tokens = 0
        self._drafted = 0
        self._accepted_drafts = 0
        self._prefix_queries = 0
        self._prefix_hits = 0
        self._step_started_at: float | None = None
        self._last_step_at: float | None = None

    def submit(self, request: GenerateRequest) -> None:
        """Accept a request. Raises ValueError for one that can never run, and ``BatcherClosed``."""
        if self._spec.run_k and request.temperature_is_default:
            request = msgspec.structs.replace(request, temperature=0.0)
        self._check(request)
        sequence = self._start(request)
        with self._changed:
            self._refuse_when_closed()
            if request.id in self._accepted:
                raise ValueError(f"request {request.id} is already running")
            self._accepted[request.id] = sequence
            self._waiting.append(sequence)
            self._changed.notify_all()

    def cancel(self, id: str) -> None:
        """End a request before the next step, with a CANCELLED event. Unknown ids are ignored."""
        with self._changed:
            if id in self._accepted:
                self._cancelled.add(id)
                self._changed.notify_all()

    def drain(self, timeout_s: float = 0.0) -> bool:
        """Refuse new requests and wait up to ``timeout_s`` for the accepted ones. Returns whether all have ended.

        May be called again to wait longer. Call it from another thread than the one that runs the steps.
        """
        with self._changed:
            self._draining = True
            return self._changed.wait_for(lambda: not self._accepted and not self._stepping, timeout_s)

    def close(self) -> None:
        """Refuse new requests and end all others with an ERROR event in the next step, after which ``run`` returns."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def warm_guides(self) -> None:
        """Load the vocabulary for guided decoding ahead of time: seconds for a large one. Any thread may call this."""
        if self._spec.returns == "logits":
            self._guides.warm()

    @property
    def engine(self) -> GenerateEngine:
        """The engine that the batcher drives. Only the thread that runs the steps may call it."""
        return self._engine

    @property
    def stats(self) -> BatcherStats:
        with self._changed:
            return BatcherStats(
                slots=len(self._slots),
                live=self._slots.live_count,
                waiting=len(self._waiting),
                prefilling=self._prefilling,
                steps=self._steps,
                tokens=self._tokens,
                step_started_at=self._step_started_at,
                last_step_at=self._last_step_at,
                draining=self._draining,
                failed=self._failed,
                drafted=self._drafted,
                accepted=self._accepted_drafts,
                prefix_queries=self._prefix_queries,
                prefix_hits=self._prefix_hits,
            )

    def run(self, after_step: Callable[[], None] = lambda: None) -> None:
        """Run steps until ``close``, waiting while idle. Raises the exceptions of the engine and of ``emit``.

        ``after_step`` is called after each step, on this thread.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._accepted or self._closing)
                if self._closing and not self._accepted:
                    return
            self.step()
            after_step()

    def step(self) -> bool:
        """Run one step. Returns False with nothing to do. Raises the exceptions of the engine and of ``emit``."""
        with self._changed:
            if self._failed is not None:
                raise BatcherClosed(self._failed)
            self._stepping = True
            events = self._end_cancelled()
            if self._closing:
                events += self._end_all("the replica is closing")
            joining = self._admit()
            rows = joining or self._slots.live()
            self._prefilling = len(joining)
            self._step_started_at = self._clock() if rows else None
        try:
            if rows:
                events += self._run_engine(rows, is_prefill=bool(joining))
        except Exception as error:
            step = "prefill" if joining else "decode"
            reason = f"the engine failed in a {step} of {len(rows)} slots: {type(error).__name__}: {error}"
            events += self._fail(reason)
            raise
        finally:
            self._send(events)
        return bool(rows or events)

    def _check(self, request: GenerateRequest) -> None:
        spec, length = self._spec, len(request.prompt_ids)
        if not length:
            raise ValueError("the prompt is empty")
        if request.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {request.max_tokens}")
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= spec.vocab_size:
            raise ValueError(f"the prompt has ids outside the vocabulary of {spec.vocab_size}")
        if length > spec.prefill_buckets[-1]:
            raise ValueError(f"the prompt has {length} tokens, the limit is {spec.prefill_buckets[-1]}")
        if length + request.max_tokens > spec.max_len:
            raise ValueError(
                f"{length} prompt tokens and max_tokens {request.max_tokens} exceed the {spec.max_len} of a slot"
            )
        sampling.check_sampling(request, spec.vocab_size)
        if spec.returns == "tokens":
            if changes_choice(request) or request.logprobs is not None or request.guide is not None:
                raise ValueError(
                    "this model's engine samples the tokens itself: logit_bias, penalties, no_repeat_ngram_size, "
                    "logprobs and JSON schemas are not supported"
                )
            if spec.device_top_k:
                sampling.check_device_sampling(request, spec.device_top_k)
            elif spec.run_k and not sampling.is_greedy(request):
                raise ValueError(
                    "this model's engine speculates on the device, which is greedy: "
                    f"temperature must be 0, not {request.temperature:g}"
                )

    def _start(self, request: GenerateRequest) -> _Sequence:
        """Returns the state of a new request. Raises ValueError for an unsupported schema or stop string."""
        guide = None if request.guide is None else self._guides.start(request.guide)
        ending_ids = frozenset(request.stop_token_ids)
        if guide is not None:  # its EOS completes the value, so ignore_eos does not apply
            ending_ids |= guide.eos_ids
        elif not request.ignore_eos:
            ending_ids |= self._spec.eos_token_ids
        stream = self._tokenizer.stream(request.prompt_ids, request.skip_special_tokens)
        return _Sequence(
            request,
            AnswerText(stream, request.stop, request.min_tokens),
            sampling.start_sampling(request, ending_ids, guide) if self._spec.returns == "logits" else None,
            ending_ids,
        )

    def _refuse_when_closed(self) -> None:
        if self._failed is not None:
            raise BatcherClosed(self._failed)
        if self._closing:
            raise BatcherClosed("the replica is closing")
        if self._draining:
            raise BatcherClosed("the replica is draining")

    def _end_cancelled(self) -> list[TokenEvent]:
        """Step 1."""
        if not self._cancelled:
            return []
        events = [self._accepted.pop(request_id).end(FinishReason.CANCELLED) for request_id in self._cancelled]
        self._waiting = deque(s for s in self._waiting if s.request.id not in self._cancelled)
        for slot, sequence in self._slots.live():
            if sequence.request.id in self._cancelled:
                self._release(slot, FinishReason.CANCELLED)
        self._cancelled.clear()
        return events

    def _end_all(self, error: str) -> list[TokenEvent]:
        events = [sequence.end(FinishReason.ERROR, error) for sequence in self._accepted.values()]
        for slot, _ in self._slots.live():
            self._release(slot, FinishReason.ERROR)
        self._accepted.clear()
        self._waiting.clear()
        self._cancelled.clear()
        return events

    def _admit(self) -> list[tuple[int, _Sequence]]:
        """Step 2: returns the requests that join now with their slots, sorted by slot; empty for no prefill."""
        live = self._slots.live_count
        if live and (self._just_prefilled or not self._spec.continuous):  # 2a, 2b
            return []
        joining: list[tuple[int, _Sequence]] = []
        prompt = answer = 0  # the longest of those that join
        while self._waiting and self._slots.free_count:
            sequence = self._waiting[0]
            request, reuse = sequence.request, self._reuse(sequence)
            sequence.start = 0 if reuse is None else reuse.count
            prompt, answer = max(prompt, len(request.prompt_ids) - sequence.start), max(answer, request.max_tokens)
            if joining and not self._join_fits(len(joining) + 1, prompt, answer):
                break
            joining.append((self._take(sequence, reuse), self._waiting.popleft()))
        return sorted(joining, key=lambda row: row[0])

    def _reuse(self, sequence: _Sequence) -> Reuse | None:
        """Returns the free slot to join and its reusable prefix; None for the lowest slot, without a prefix cache."""
        if self._prefixes is None:
            return None
        return self._prefixes.place(sequence.request.prompt_ids, self._slots.free())

    def _take(self, sequence: _Sequence, reuse: Reuse | None) -> int:
        if reuse is None or self._prefixes is None:
            return self._slots.take(sequence)
        self._prefixes.drop(reuse.slot)  # until the prefill is done, its content is unknown
        if reuse.source is not None:
            self._copies.append((reuse.source, reuse.slot, reuse.count))
        self._prefix_queries += len(sequence.request.prompt_ids)
        self._prefix_hits += reuse.count
        return self._slots.take(sequence, reuse.slot)

    def _release(self, slot: int, finish: FinishReason) -> None:
        """Free the slot of a request that has ended. Its content is known unless the request failed."""
        sequence = self._slots.release(slot)
        if self._prefixes is None:
            return
        if finish is FinishReason.ERROR:
            self._prefixes.drop(slot)
        else:
            self._prefixes.hold(slot, [*sequence.request.prompt_ids, *sequence.ids][: sequence.position])

    def _join_fits(self, count: int, prompt: int, answer: int) -> bool:
        """2c, 2d: whether ``count`` requests may join together; the lengths are those of the longest one."""
        if not self._spec.continuous:
            return prompt + answer <= self._spec.max_len
        buckets = self._spec.prefill_buckets
        return count * smallest_bucket(buckets, prompt) <= buckets[-1]

    def _run_engine(self, rows: Sequence[tuple[int, _Sequence]], is_prefill: bool) -> list[TokenEvent]:
        """Steps 2 and 3: call the engine once for ``rows``. Returns an event for each."""
        slots = [slot for slot, _ in rows]
        sequences = [sequence for _, sequence in rows]
        ahead = 0 if is_prefill else self._draft_length(sequences)
        if ahead and self._drafting is not None:
            events = self._speculate(self._drafting, slots, sequences, ahead)
        elif self._running is not None and not is_prefill and self._room(sequences) >= self._spec.run_k:
            events = self._take_runs(self._running, slots, sequences)
        else:
            if is_prefill:
                output = self._prefill(slots, sequences)
            else:
                output = self._engine.decode(slots, [s.last_token for s in sequences], [s.position for s in sequences])
            chosen = self._chosen(output, sequences)
            events = [sequence.advance(*choice) for sequence, choice in zip(sequences, chosen, strict=True)]
        with self._changed:
            for (slot, sequence), event in zip(rows, events, strict=True):
                if event.finish is not None:
                    self._release(slot, event.finish)
                    del self._accepted[sequence.request.id]
                    self._cancelled.discard(sequence.request.id)
                elif is_prefill and self._prefixes is not None:
                    self._prefixes.hold(slot, sequence.request.prompt_ids)
            self._just_prefilled = is_prefill
            self._steps += 1
            self._tokens += sum(len(event.token_ids) for event in events)
            self._prefilling = 0
            self._step_started_at = None
            self._last_step_at = self._clock()
        return events

    def _prefill(self, slots: Sequence[int], sequences: Sequence[_Sequence]) -> Any:
        """Step 2, from where each slot's reusable prefix ends."""
        if self._sampling is not None:
            max_ids = self._spec.device_top_k
            self._sampling.sample_by(slots, [sampling.on_device(s.request, max_ids) for s in sequences])
        prompts, starts = [s.request.prompt_ids for s in sequences], [s.start for s in sequences]
        if self._continuing is None or not any(starts):
            return self._engine.prefill(slots, prompts)
        # In the order of admission: a slot that is copied from may be overwritten by a later prefill.
        for source, slot, count in self._copies:
            self._continuing.copy_prefix(source, slot, count)
        self._copies.clear()
        return self._continuing.prefill_from(slots, prompts, starts)

    def _draft_length(self, sequences: Sequence[_Sequence]) -> int:
        """Returns the number of tokens to draft; 0 for an ordinary decode.

        It is 0 where no plainly greedy request needs more than one token, and at most what fits into every slot. A
        request that needs n tokens has room for n, so a greedy one gets its drafts in every step, as engines require.
        """
        if self._drafting is None:
            return 0
        lengths = [s.request.max_tokens - s.produced - 1 for s in sequences if s.is_plainly_greedy]
        return min(self._spec.draft_k, self._room(sequences), max(lengths, default=0))

    def _room(self, sequences: Sequence[_Sequence]) -> int:
        """Returns how many tokens beyond the next one fit into every slot."""
        return min(self._spec.max_len - 1 - s.position for s in sequences)

    def _speculate(
        self, engine: DraftingEngine, slots: Sequence[int], sequences: Sequence[_Sequence], ahead: int
    ) -> list[TokenEvent]:
        """Step 3 with ``ahead`` drafted tokens for each plainly greedy request, padding for the others."""
        greedy = [row for row, sequence in enumerate(sequences) if sequence.is_plainly_greedy]
        sampled = [row for row in range(len(sequences)) if row not in greedy]
        positions = [sequence.position for sequence in sequences]
        # An engine that loses the KV cache of unlisted slots needs guesses for all of them, also unused ones.
        drafted = greedy if self._spec.keeps_idle_slots else list(range(len(sequences)))
        guesses = engine.draft(
            [slots[row] for row in drafted],
            [sequences[row].last_two for row in drafted],
            [positions[row] for row in drafted],
            ahead,
        )
        by_row = dict(zip(drafted, guesses, strict=True))
        drafts = [by_row[row] for row in greedy]
        tokens = [[sequence.last_token, *by_row.get(row, [0] * ahead)] for row, sequence in enumerate(sequences)]
        logits = engine.verify(slots, tokens, positions)
        runs = agreed(logits[greedy], drafts)
        with self._changed:
            self._drafted += ahead * len(greedy)
            self._accepted_drafts += sum(len(run) - 1 for run in runs)
        events = {row: sequences[row].advance_all(run) for row, run in zip(greedy, runs, strict=True)}
        if sampled:
            members = [sequences[row] for row in sampled]
            for row, choice in zip(sampled, self._chosen(logits[sampled, 0], members), strict=True):
                events[row] = sequences[row].advance(*choice)
        return [events[row] for row in range(len(sequences))]

    def _take_runs(self, engine: RunEngine, slots: Sequence[int], sequences: Sequence[_Sequence]) -> list[TokenEvent]:
        """Step 3 where the engine speculates within its step."""
        runs = engine.decode_runs(slots, [s.last_token for s in sequences], [s.position for s in sequences])
        with self._changed:
            self._drafted += self._spec.run_k * len(runs)
            self._accepted_drafts += sum(len(run) - 1 for run in runs)
        return [sequence.advance_all(run) for sequence, run in zip(sequences, runs, strict=True)]

    def _chosen(self, output: Any, sequences: Sequence[_Sequence]) -> Sequence[tuple[int | None, TokenLogprobs | None]]:
        """Returns the next token of each of ``sequences``, and its logprobs where requested."""
        if self._spec.returns == "tokens":
            return [(token, None) for token in output]
        tokens = sampling.sample(output, [s.sampler for s in sequences if s.sampler is not None])
        counts = [s.request.logprobs for s in sequences]
        return list(zip(tokens, token_logprobs(output, tokens, counts, self._tokenizer.token_bytes), strict=True))

    def _fail(self, reason: str) -> list[TokenEvent]:
        with self._changed:
            self._failed = reason
            self._prefilling = 0
            self._step_started_at = None
            return self._end_all(reason)

    def _send(self, events: list[TokenEvent]) -> None:
        """Emit the events before ``drain`` can return, since its caller may end the process."""
        try:
            if events:
                self._emit(events)
        except Exception as error:
            self._fail(f"events cannot be sent: {type(error).__name__}: {error}")
            raise
        finally:
            with self._changed:
                self._stepping = False
                if not self._accepted:
                    self._slots.check_integrity()
                    self._changed.notify_all()
