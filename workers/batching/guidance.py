"""Guided decoding for JSON schemas: the tokens that may come next, by `llguidance` (extra ``json``)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from workers.messages.requests import GUIDE, InvalidField
from workers.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch
    from llguidance import LLParserLimits

# Whitespace between two parts of an answer: one space, or a newline with indentation. With more, a model that prefers
# spaces fills `max_tokens` with them: with 32 at each place, an object of three fields has 320.
MAX_INDENT = 16  # spaces; half as many tabs
_WHITESPACE = rf"\x20|\x0D?\x0A(\x20{{0,{MAX_INDENT}}}|\x09{{0,{MAX_INDENT // 2}}})"

MAX_COMPILED = 32  # cached schemas, at up to 4 MB each; the least recently used one is evicted
MAX_REASON = 300  # characters of llguidance's own message


class Guides:
    """Creates the guides of one model's requests. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """``vocab_size`` and ``eos_token_ids`` are the model's. Nothing is loaded before the first ``start``."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._vocabulary: Any = None
        self._compiling = threading.Lock()  # choices of one request arrive together: the first one compiles for all
        self._compiled = lru_cache(MAX_COMPILED)(self._compile)

    def start(self, schema: str) -> Guide:
        """Returns the guide of a new answer. Takes up to a second for a large schema that is not compiled yet.

        Raises InvalidField for text that is not JSON, and for a schema that no value satisfies or that llguidance does
        not support; ValueError where llguidance is not installed, and where llguidance cannot read the tokenizer.
        """
        try:
            import llguidance  # noqa: F401
        except ImportError as error:
            raise ValueError(
                "JSON mode and JSON schemas need llguidance, which is not installed on this replica: "
                "pip install 'llguidance>=1.0' in its Python"
            ) from error
        vocabulary = self._loaded()
        with self._compiling:
            compiled = self._compiled(schema)
            if isinstance(compiled, str):
                raise InvalidField(GUIDE, compiled)
            return Guide(compiled.deep_copy(), vocabulary.vocab_size, frozenset(vocabulary.eos_tokens))

    def _compile(self, schema: str) -> Any:
        """Returns a matcher in its initial state, to be copied, or the error message where the schema is refused."""
        from llguidance import LLMatcher

        vocabulary = self._loaded()
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _WHITESPACE})
        except ValueError as error:
            return f"the JSON schema cannot be read: {_brief(str(error))}"
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=_limits())
        if matcher.is_error():
            return f"the JSON schema is not supported: {_brief(matcher.get_error())}"
        if not Guide(matcher.deep_copy(), vocabulary.vocab_size, frozenset()).can_begin():
            return (
                "the JSON schema is not supported: no answer can begin under it; a $ref that leads back to itself, "
                "for example, never ends"
            )
        return matcher

    def warm(self) -> None:
        """Load the vocabulary now, so that no request waits for it; does nothing where guides are unavailable."""
        with contextlib.suppress(ImportError, ValueError):
            self._loaded()

    def _loaded(self) -> Any:
        """Returns llguidance's form of the vocabulary: 30 ms for 512 ids, 1 s for 32k, 4 s for 128k, once."""
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
    """The progress of one answer in its grammar. Used by one thread at a time."""

    def __init__(self, matcher: Any, vocab_size: int, eos_ids: frozenset[int]) -> None:
        import numpy as np

        self._matcher = matcher
        self._mask = np.zeros((vocab_size + 31) // 32, dtype=np.int32)
        self.eos_ids = eos_ids  # allowed only when the answer is complete; they end it

    @property
    def ended(self) -> bool:
        """Returns whether the answer is complete and no token can follow."""
        return bool(self._matcher.is_stopped())

    @property
    def error(self) -> str | None:
        """Why the guide cannot continue: the grammar exceeds llguidance's limits."""
        if not self._matcher.is_error():
            return None
        return f"the JSON schema is not supported: {_brief(self._matcher.get_error())}"

    def can_begin(self) -> bool:
        """Returns whether any token is allowed."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        return bool(self._mask.any()) and not self._matcher.is_error()

    def forbidden(self, vocab_size: int) -> torch.Tensor | None:
        """Returns ``[vocab_size]`` bool, True for each id that must not come next; None after an error."""
        import numpy as np
        import torch

        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if self._matcher.is_error():
            return None
        allowed = np.unpackbits(self._mask.view(np.uint8), bitorder="little")[:vocab_size]
        return torch.from_numpy(np.pad(allowed, (0, vocab_size - len(allowed)))) == 0

    def advance(self, token: int) -> None:
        """Advance by the chosen token."""
        self._matcher.consume_token(token)


def _limits() -> LLParserLimits:
    """Returns llguidance's limits of one answer. Its defaults allow 0.5 GB of lexer states and masks of 100 ms, during
    which the whole batch waits; with these a mask takes some milliseconds, and usual schemas of 64 KiB compile."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=50_000,
        step_max_items=10_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        max_items_in_row=1_000,
    )


def _brief(reason: str) -> str:
    """Returns llguidance's message without the parser state after it, cut where it quotes the schema at length."""
    reason = reason.partition("\n<state>")[0].partition("\n<non-verbose/>")[0]
    return reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]}..."
