"""A request that a batcher has accepted, from its prompt to the last event of its answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from workers.batching.penalties import changes_choice
from workers.batching.sampling import Sampling, check_device_sampling, check_sampling, is_greedy
from workers.messages.engine_protocol import EngineSpec
from workers.messages.requests import GUIDE, FinishReason, GenerateRequest, InvalidField, TokenEvent, TokenLogprobs
from workers.text.detokenizer import AnswerText

NOT_SCORED = (
    "the logprobs of a prompt need the logits of all its tokens, which this replica does not return: it samples or "
    "speculates on the device, keeps prefixes in blocks, or is vLLM on Neuron devices; use a model without these"
)
PROMPT_TOKENS = 64  # with logprobs in one event, at up to 2 KB each


@dataclass(eq=False)
class AcceptedRequest:
    """A request and the progress of its answer."""

    request: GenerateRequest
    answer: AnswerText
    sampler: Sampling | None  # None where the engine samples
    ending_ids: frozenset[int]  # not before min_tokens
    produced: int = 0
    last_token: int = -1
    token_before_last: int = -1
    ids: list[int] = field(default_factory=list)  # of the answer
    start: int = 0  # prompt tokens that the slot already holds before the prefill
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # not sent yet
    read: int = (
        0  # prompt tokens that the engine has got, or gets next; fewer than all while steps score them one by one
    )

    def __post_init__(self) -> None:
        self.read = self.read or len(self.request.prompt_ids)

    @property
    def scores(self) -> bool:
        """Returns whether the next logits are those of a token of the prompt."""
        return self.read < len(self.request.prompt_ids)

    @property
    def prompt(self) -> Sequence[int]:
        """The tokens of the prefill."""
        return self.request.prompt_ids[: self.read] if self.scores else self.request.prompt_ids

    @property
    def last_two(self) -> tuple[int, int]:
        """The tokens at the last two positions; before the second answer token, the first is the prompt's last."""
        return self.token_before_last, self.last_token

    @property
    def is_plainly_greedy(self) -> bool:
        """Returns whether every token is just the argmax of the logits. Constant for the life of the request."""
        sampler = self.sampler
        if sampler is None or self.request.logprobs is not None or self.request.prompt_logprobs is not None:
            return False
        return sampler.generator is None and not (sampler.penalties or sampler.guide or sampler.budget)

    @property
    def position(self) -> int:
        """The number of tokens in the slot's KV cache: all but the last, which the next decode writes there."""
        return self.read + self.produced - 1

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
            if self.sampler.guide is not None and self.sampler.guide.error is not None:  # the client's schema
                return self.end(FinishReason.INVALID, self.sampler.error, GUIDE)
            return self.end(FinishReason.ERROR, self.sampler.error)
        if self.scores:  # a step that has scored a token of the prompt
            self.token_before_last, self.last_token = request.prompt_ids[self.read - 1], token
            self.read += 1
            return TokenEvent(id=request.id)
        if not request.max_tokens:
            return self.end(FinishReason.LENGTH)
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
            stop="" if finish is None else self.answer.stop,
        )

    def with_prompt(self, event: TokenEvent) -> Iterator[TokenEvent]:
        """Yields the event of a step after those with the logprobs of the prompt, many of them together."""
        if not self.scores or event.finish is not None or len(self.prompt_logprobs) >= PROMPT_TOKENS:
            yield from self.take_prompt_logprobs()
        if event.token_ids or event.finish is not None:
            yield event

    def take_prompt_logprobs(self) -> Iterator[TokenEvent]:
        """Yields the events with the logprobs of the prompt."""
        scored, self.prompt_logprobs = self.prompt_logprobs, []
        for begin in range(0, len(scored), PROMPT_TOKENS):
            yield TokenEvent(id=self.request.id, prompt_logprobs=scored[begin : begin + PROMPT_TOKENS])

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
            stop=events[-1].stop,
        )

    def _grow(self, token: int) -> tuple[str, FinishReason | None]:
        """Returns the text that ``token`` adds, and the finish if the answer ends for another reason than its id."""
        text = self.answer.push(token)
        if self.answer.stop:
            return text, FinishReason.STOP
        if self.is_complete:
            return text + self.answer.finish(), FinishReason.STOP
        if self.produced >= self.request.max_tokens:
            text += self.answer.finish()
            return text, FinishReason.STOP if self.answer.stop else FinishReason.LENGTH
        return text, None

    def end(self, finish: FinishReason, error: str | None = None, param: str = "") -> TokenEvent:
        return TokenEvent(id=self.request.id, finish=finish, error=error, param=param)


def check_request(request: GenerateRequest, spec: EngineSpec) -> None:
    """Raises ValueError for a request that an engine of ``spec`` can never run."""
    length = len(request.prompt_ids)
    if not length:
        raise ValueError("the prompt is empty")
    if request.max_tokens < 0:
        raise InvalidField("max_tokens", f"max_tokens must be at least 0, not {request.max_tokens}")
    if (
        request.prompt_logprobs is not None
        and not spec.scores_prompts
        and (spec.returns == "tokens" or spec.shares_blocks)
    ):
        raise InvalidField("prompt_logprobs", NOT_SCORED)
    if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= spec.vocab_size:
        raise ValueError(f"the prompt has ids outside the vocabulary of {spec.vocab_size}")
    if length > spec.prefill_buckets[-1]:
        raise ValueError(f"the prompt has {length} tokens, the limit is {spec.prefill_buckets[-1]}")
    if length + request.max_tokens > spec.max_len:
        raise ValueError(
            f"{length} prompt tokens and max_tokens {request.max_tokens} exceed the {spec.max_len} of a slot"
        )
    check_sampling(request, spec.vocab_size)
    if spec.returns == "tokens":
        if changes_choice(request) or request.logprobs is not None or request.guide is not None:
            raise ValueError(
                "this model's engine samples the tokens itself: logit_bias, penalties, no_repeat_ngram_size, "
                "logprobs and structured outputs are not supported"
            )
        if spec.device_top_k:
            check_device_sampling(request, spec.device_top_k)
        elif spec.run_k and not is_greedy(request):
            raise InvalidField(
                "temperature",
                "this model's engine speculates on the device, which is greedy: "
                f"temperature must be 0, not {request.temperature:g}",
            )
