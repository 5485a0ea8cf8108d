"""Penalties and biases: the processors that change the scores of single ids for one request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from workers.messages.requests import GenerateRequest

if TYPE_CHECKING:
    import torch


class Penalties:
    """Applies the per-id processors of one request, and holds the token counts that they need.

    In this order, that of transformers' ``generate``, with ours where it puts custom processors:

    1. logit_bias is added (transformers' SequenceBias).
    2. repetition_penalty, on all ids of prompt and output (transformers' own class, given only the scores it changes).
    3. no_repeat_ngram_size, in prompt and output together (transformers' NoRepeatNGram).
    4. min_tokens: before that many tokens, no id that ends the answer is allowed (transformers' MinNewTokensLength
       does so for EOS alone; vLLM, like us, for the stop ids too).
    5. presence_penalty and frequency_penalty, on the ids of the output alone, as OpenAI defines them:
       ``score -= frequency * count + presence * (count > 0)``.

    The state grows by one token at a time; no step scans the whole answer in Python.
    """

    def __init__(self, request: GenerateRequest, ending_ids: frozenset[int]) -> None:
        """``ending_ids`` are those that end the answer: EOS, unless it is ignored, and the request's stop ids."""
        import torch

        self._biased = torch.tensor(list(request.logit_bias), dtype=torch.int64)
        self._bias = torch.tensor(list(request.logit_bias.values()), dtype=torch.float32)
        self._ending = torch.tensor(sorted(ending_ids), dtype=torch.int64)
        self._min_tokens = request.min_tokens if ending_ids else 0
        self._repetition = request.repetition_penalty
        self._presence, self._frequency = request.presence_penalty, request.frequency_penalty
        ngram_size = request.no_repeat_ngram_size
        self._ngrams = Ngrams(ngram_size, request.prompt_ids) if ngram_size else None
        self._all_ids = _Ids(request.prompt_ids, request.max_tokens) if self._repetition != 1 else None
        counts_output = bool(self._presence or self._frequency)
        self._output = _Ids((), request.max_tokens) if counts_output else None
        self._produced = 0
        self._lasting = changes_choice(request)

    @property
    def active(self) -> bool:
        """Returns whether ``apply`` may change anything, now or with the next token."""
        return self._lasting or self._produced < self._min_tokens

    def record(self, token: int) -> None:
        """Count the chosen token."""
        self._produced += 1
        if self._all_ids is not None:
            self._all_ids.add(token)
        if self._output is not None:
            self._output.add(token)
        if self._ngrams is not None:
            self._ngrams.add(token)

    def apply(self, scores: torch.Tensor) -> None:
        """Change the scores ``[vocab_size]`` float32 of the next token in place; numbered as in the class."""
        if self._biased.numel():  # 1
            scores[self._biased] += self._bias
        if self._all_ids is not None:  # 2
            scores[self._all_ids.ids] = _repetition_penalty(scores[self._all_ids.ids], self._repetition)
        if self._ngrams is not None and (banned := self._ngrams.repeating()):  # 3
            scores[list(banned)] = float("-inf")
        if self._produced < self._min_tokens:  # 4
            scores[self._ending] = float("-inf")
        if self._output is not None:  # 5
            scores[self._output.ids] -= self._frequency * self._output.counts + self._presence


def needs_penalties(request: GenerateRequest) -> bool:
    """Returns whether any parameter of the request needs ``Penalties``."""
    return changes_choice(request) or bool(request.min_tokens)


def changes_choice(request: GenerateRequest) -> bool:
    """Returns whether ``Penalties`` affect the tokens themselves, and not only how early the answer may end."""
    return bool(
        request.logit_bias
        or request.repetition_penalty != 1
        or request.no_repeat_ngram_size
        or request.presence_penalty
        or request.frequency_penalty
    )


def _repetition_penalty(scores: torch.Tensor, penalty: float) -> torch.Tensor:
    """Returns ``scores`` ``[n]`` with transformers' own penalty on each."""
    import torch
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    all_indices = torch.arange(len(scores))[None]
    processed: torch.Tensor = RepetitionPenaltyLogitsProcessor(float(penalty))(all_indices, scores[None])
    return processed[0]


class _Ids:
    """Distinct ids and their counts, as tensors that grow without being copied."""

    def __init__(self, ids: Iterable[int], room: int) -> None:
        """``room`` is the number of further tokens."""
        import torch

        self._place: dict[int, int] = {}  # of each id in the tensors
        initial = list(ids)
        size = len(set(initial)) + room
        self._ids = torch.zeros(size, dtype=torch.int64)
        self._counts = torch.zeros(size, dtype=torch.float32)
        for token in initial:
            self.add(token)

    @property
    def ids(self) -> torch.Tensor:
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> torch.Tensor:
        return self._counts[: len(self._place)]

    def add(self, token: int) -> None:
        place = self._place.setdefault(token, len(self._place))
        self._ids[place] = token
        self._counts[place] += 1


class Ngrams:
    """The tokens that have followed each run of ``size - 1`` tokens."""

    def __init__(self, size: int, first: Iterable[int]) -> None:
        self._context_length = size - 1
        self._last: tuple[int, ...] = ()
        self._followers: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        for token in first:
            self.add(token)

    def add(self, token: int) -> None:
        if len(self._last) == self._context_length:
            self._followers[self._last].add(token)
        self._last = (*self._last, token)[-self._context_length :] if self._context_length else ()

    def repeating(self) -> set[int]:
        """Returns the tokens that would repeat an n-gram."""
        return self._followers.get(self._last, set())
