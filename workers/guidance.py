"""Answers that satisfy a JSON schema: after each token, which ones may follow. By `llguidance`, extra ``json``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from workers.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

# In one place; unlimited, a model that likes spaces best fills its answer with them and never comes to an end.
MAX_WHITESPACE = 32  # characters: 16 levels of indentation
_WHITESPACE = rf"[\x20\x0A\x0D\x09]{{1,{MAX_WHITESPACE}}}"


class Guides:
    """Makes the guides of one model's requests. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """``vocab_size`` and ``eos_token_ids`` are the model's. Nothing is loaded before the first ``start``."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._vocabulary: Any = None

    def start(self, schema: str) -> Guide:
        """The guide of a new answer.

        Raises ValueError for what is no JSON, for a schema that no value satisfies, or that says what llguidance does
        not know; also where llguidance is not installed, or the tokenizer has no form that it can read.
        """
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise ValueError(
                "JSON mode and JSON schemas need llguidance, which is not installed on this replica: "
                "pip install 'llguidance>=1.0' in its Python"
            ) from error
        vocabulary = self._loaded()
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _WHITESPACE})
        except ValueError as error:
            raise ValueError(f"the JSON schema cannot be read: {error}") from error
        matcher = LLMatcher(vocabulary, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(f"the JSON schema cannot be followed: {matcher.get_error()}")
        return Guide(matcher, vocabulary.vocab_size, frozenset(vocabulary.eos_tokens))

    def warm(self) -> None:
        """Load the vocabulary now, so that no request waits for it; nothing happens where guides cannot be had."""
        with contextlib.suppress(ImportError, ValueError):
            self._loaded()

    def _loaded(self) -> Any:
        """llguidance's form of the vocabulary: 30 ms for 512 ids, 1 s for 32k, 4 s for 128k, once."""
        from llguidance import LLTokenizer

        with self._lock:
            if self._vocabulary is None:
                text = self._tokenizer.to_json()
                if text is None:
                    raise ValueError("this model's tokenizer cannot be used for JSON mode and JSON schemas")
                self._vocabulary = LLTokenizer(
                    text,
                    n_vocab=max(self._vocab_size, self._tokenizer.vocab_size),
                    eos_token=self._eos_token_ids or None,  # None: llguidance takes the tokenizer's
                )
            return self._vocabulary


class Guide:
    """How far one answer is in its grammar. Used by one thread at a time."""

    def __init__(self, matcher: Any, vocab_size: int, eos_ids: frozenset[int]) -> None:
        import numpy as np

        self._matcher = matcher
        self._mask = np.zeros((vocab_size + 31) // 32, dtype=np.int32)
        self.eos_ids = eos_ids  # they can come only when the answer is complete, and end it

    @property
    def ended(self) -> bool:
        """Whether the answer is complete, and nothing could follow."""
        return bool(self._matcher.is_stopped())

    @property
    def error(self) -> str | None:
        """Why the guide cannot go on: a grammar that outgrew llguidance's limits."""
        return f"the JSON schema cannot be followed: {self._matcher.get_error()}" if self._matcher.is_error() else None

    def forbidden(self, vocab_size: int) -> torch.Tensor | None:
        """True for every id that must not come next, ``[vocab_size]`` bool; None after an error."""
        import numpy as np
        import torch

        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if self._matcher.is_error():
            return None
        allowed = np.unpackbits(self._mask.view(np.uint8), bitorder="little")[:vocab_size]
        return torch.from_numpy(np.pad(allowed, (0, vocab_size - len(allowed)))) == 0

    def take(self, token: int) -> None:
        """Go on behind the token that came."""
        self._matcher.consume_token(token)
