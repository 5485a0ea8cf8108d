"""Guided decoding: computes the tokens that a constraint allows next, with `llguidance` (extra ``json``)."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Collection, Mapping
from enum import Enum, auto
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from workers.messages.requests import GUIDE, AnswerConstraint, InvalidField
from workers.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch
    from llguidance import LLParserLimits

# Whitespace between two parts of an answer: one space, or a newline with indentation. With more, a model that prefers
# spaces fills `max_tokens` with them: with 32 at each place, an object of three fields has 320.
MAX_INDENT = 16  # spaces; half as many tabs
_WHITESPACE = rf"\x20|\x0D?\x0A(\x20{{0,{MAX_INDENT}}}|\x09{{0,{MAX_INDENT // 2}}})"

MAX_NEWLINES = 2  # after the reasoning, where models were trained to write them
MAX_COMPILED = 32  # cached constraints, at up to 4 MB each; the least recently used one is evicted
MAX_REASON = 300  # characters of llguidance's own message
Kind = Literal["json", "regex", "grammar", "choice", "structural_tag"]
_NAMES: Mapping[Kind, str] = MappingProxyType(
    {
        "json": "JSON schema",
        "regex": "regular expression",
        "grammar": "grammar",
        "choice": "list of choices",
        "structural_tag": "structural tag",
    }
)


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

    def start(self, constraint: AnswerConstraint) -> Guide:
        """Returns the guide of a new answer. Takes up to a second for a large schema that is not compiled yet.

        Raises InvalidField for a text that cannot be read, and for a constraint that no answer satisfies or that
        llguidance does not support; ValueError where llguidance is not installed, and where it cannot read the
        tokenizer.
        """
        try:
            import llguidance  # noqa: F401
        except ImportError as error:
            raise ValueError(
                "structured outputs need llguidance, which is not installed on this replica: "
                "pip install 'llguidance>=1.0' in its Python"
            ) from error
        vocabulary = self._loaded()
        with self._compiling:
            compiled = self._compiled(constraint.kind, constraint.text)
            if isinstance(compiled, str):
                raise InvalidField(GUIDE, compiled)
            return Guide(compiled.deep_copy(), vocabulary, constraint)

    def _compile(self, kind: Kind, text: str) -> Any:
        """Returns a matcher in its initial state, to be copied, or the error message where the text is refused."""
        from llguidance import LLMatcher

        vocabulary, name = self._loaded(), _NAMES[kind]
        try:
            grammar = _grammar(kind, text, vocabulary)
        except ValueError as error:
            return f"the {name} cannot be read: {_brief(str(error))}"
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=_limits())
        if matcher.is_error():
            return f"the {name} is not supported: {_brief(matcher.get_error())}"
        if not Guide(matcher.deep_copy(), vocabulary, AnswerConstraint(text, kind)).can_begin():
            return (
                f"the {name} is not supported: no answer can begin under it; a $ref that leads back to itself, "
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
                    raise ValueError("this model's tokenizer cannot be used for structured outputs")
                self._vocabulary = LLTokenizer(
                    text,
                    n_vocab=max(self._vocab_size, self._tokenizer.vocab_size),
                    eos_token=self._eos_token_ids or None,  # None: llguidance takes the tokenizer's
                )
            return self._vocabulary


class _Section(Enum):
    """The part of an answer that the next token belongs to."""

    REASONING = auto()  # not constrained, but the answer cannot end in it
    CONSTRAINED = auto()
    CALL = auto()  # not constrained


class Guide:
    """The progress of one answer in its grammar. Used by one thread at a time."""

    def __init__(self, matcher: Any, vocabulary: Any, constraint: AnswerConstraint) -> None:
        import numpy as np

        self._matcher = matcher
        self._vocabulary = vocabulary
        self._name = _NAMES[constraint.kind]
        self._mask = np.zeros((vocabulary.vocab_size + 31) // 32, dtype=np.int32)
        self.eos_ids = frozenset(vocabulary.eos_tokens)  # allowed only when the answer is complete; they end it
        self._markers = markers = constraint.markers
        self._part = _Section.REASONING if markers.close and markers.opened else _Section.CONSTRAINED
        self._reasoning = ""  # the end of the reasoning, in which the closing text may begin
        opens = markers.open if markers.close and not markers.opened else ""
        self._openings = self._openings_of(opens)
        self._in_grammar = True  # the tokens of the constrained part so far follow the grammar
        self._newlines: dict[int, int] = {}  # tokens of newlines, with their number
        self._newlines_left = 0  # newlines that may still follow the reasoning

    def _openings_of(self, reasoning: str) -> list[tuple[list[int], _Section]]:
        """Returns the tokens with which another part may begin in place of the constrained one."""
        parts = [(reasoning, _Section.REASONING)] if reasoning else []
        parts += [(call, _Section.CALL) for call in self._markers.calls]
        return [(self._vocabulary.tokenize_str(text, parse_special=True), part) for text, part in parts]

    @property
    def ended(self) -> bool:
        """Returns whether the answer is complete and no token can follow."""
        return self._part is _Section.CONSTRAINED and self._in_grammar and bool(self._matcher.is_stopped())

    @property
    def error(self) -> str | None:
        """Why the guide cannot continue: the grammar exceeds llguidance's limits."""
        if not self._matcher.is_error():
            return None
        return f"the {self._name} is not supported: {_brief(self._matcher.get_error())}"

    def can_begin(self) -> bool:
        """Returns whether any token is allowed."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        return bool(self._mask.any()) and not self._matcher.is_error()

    def forbidden(self, vocab_size: int) -> torch.Tensor | None:
        """Returns ``[vocab_size]`` bool, True for each id that must not come next; None after an error."""
        import numpy as np
        import torch

        if self._part is not _Section.CONSTRAINED:
            free = torch.zeros(vocab_size, dtype=torch.bool)
            if self._part is _Section.REASONING:
                free[[id for id in self.eos_ids if id < vocab_size]] = True
            return free
        if self._in_grammar:
            self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
            if self._matcher.is_error():
                return None
        else:
            self._mask.fill(0)
        allowed = np.unpackbits(self._mask.view(np.uint8), bitorder="little")[:vocab_size]
        newlines = [id for id, count in self._newlines.items() if count <= self._newlines_left]
        allowed[[*(ids[0] for ids, _ in self._openings), *newlines]] = 1
        return torch.from_numpy(np.pad(allowed, (0, vocab_size - len(allowed)))) == 0

    def advance(self, token: int) -> None:
        """Advance by the chosen token."""
        if self._part is _Section.CONSTRAINED:
            self._advance_constrained(token)
        elif self._part is _Section.REASONING:
            self._advance_reasoning(token)

    def _advance_constrained(self, token: int) -> None:
        count = self._newlines.get(token, MAX_NEWLINES + 1)
        if count <= self._newlines_left and not self._matcher.validate_tokens([token]):
            self._newlines_left -= count
            return
        self._newlines_left = 0
        self._openings = [(ids[1:], part) for ids, part in self._openings if ids[0] == token]
        for ids, part in self._openings:
            if not ids:
                self._part = part
                return
        if not self._openings or self._matcher.validate_tokens([token]):
            self._matcher.consume_token(token)
        else:
            self._in_grammar = False

    def _advance_reasoning(self, token: int) -> None:
        """Searches for the text that ends the reasoning or begins a call; the rest of the token is ignored."""
        self._reasoning += self._vocabulary.decode_str([token])
        texts = (self._markers.close, *self._markers.calls)
        first = min(((at, text) for text in texts if (at := self._reasoning.find(text)) >= 0), default=None)
        if first is None:
            self._reasoning = self._reasoning[-max(map(len, texts)) :]
        elif first[1] == self._markers.close:
            self._part, self._openings, self._in_grammar = _Section.CONSTRAINED, self._openings_of(""), True
            for count in range(1, MAX_NEWLINES + 1):
                ids = self._vocabulary.tokenize_str("\n" * count)
                if len(ids) == 1:
                    self._newlines[ids[0]] = count
            self._newlines_left = MAX_NEWLINES
        else:
            self._part = _Section.CALL


def _grammar(kind: Kind, text: str, vocabulary: Any) -> str:
    """Returns llguidance's form of a constraint's text. Raises ValueError for a text that cannot be read."""
    from llguidance import LLMatcher, StructTag, grammar_from

    options: Any = {"whitespace_pattern": _WHITESPACE, "coerce_one_of": True}
    if kind == "json":
        return LLMatcher.grammar_from_json_schema(text, overrides=options)
    if kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(_quoted, json.loads(text))))
    if kind == "structural_tag":
        tag = json.loads(text)
        parts = [
            StructTag(
                trigger=next(trigger for trigger in tag["triggers"] if trigger and part["begin"].startswith(trigger)),
                begin=part["begin"],
                grammar={**part["schema"], "x-guidance": options},
                end=part["end"],
            )
            for part in tag["structures"]
        ]
        special = all(len(vocabulary.tokenize_str(part.trigger, parse_special=True)) == 1 for part in parts)
        return StructTag.to_grammar(parts, assume_special=special)
    if kind == "grammar":
        text = _lark(text)
    return grammar_from("regex" if kind == "regex" else "lark", text)


def _lark(text: str) -> str:
    """Returns a grammar of Lark or GBNF as one of Lark. Raises ValueError."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        lark = any_to_lark(text)
    except Exception as error:  # noqa: BLE001 (it raises plain Exceptions)
        raise ValueError(str(error)) from None
    if lark == text and (refused := re.search("~|%json|%lark", text)):
        # A negation can take minutes, without any limit of llguidance's; a schema inside would have no limits of ours.
        raise ValueError(f"{refused[0]} is not supported; write the character ~ as \\x7e")
    return lark


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


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
