"""Incremental detokenization and stop strings: from token ids to the text that a client may see.

Pure: no clock and no I/O, and no import of torch or transformers.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers.decoders import DecodeStream

INCOMPLETE = "�"  # a decoder's output for bytes that are not a complete character (yet)


class TextStream(Protocol):
    """The text of one answer, growing token by token. Used by one thread at a time."""

    def push(self, token_id: int) -> str:
        """Returns the characters that ``token_id`` completes; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """Returns the held-back text, with incomplete characters as the tokenizer decodes them. Ends the stream."""
        ...


class FastTextStream:
    """The text of one answer, decoded by a `tokenizers` tokenizer.

    The text of an answer is ``decode(prompt + output)`` without the prefix that it shares with ``decode(prompt)``:
    decoding the output alone would lose the space that many tokenizers strip from a first token. Each push costs
    about a microsecond, the first about half a microsecond for each prompt token.
    """

    def __init__(self, tokenizer: FastTokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids = list(prompt_ids)
        self._prompt_text = self._decode()
        self._stream, self._repeated = self._primed_stream(self._prompt_text)
        self._emitted = 0  # characters
        self._holds = False

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        try:
            chunk = self._stream.step(self._tokenizer, token_id)
        except Exception as error:
            if "Invalid prefix" not in str(error):
                raise
            # Byte-fallback tokenizers revise characters: a valid byte becomes U+FFFD when an invalid one follows.
            # Emitted text stays; continue after it.
            full_text = self._decode()
            chunk = self._behind_emitted(full_text)
            self._stream, self._repeated = self._primed_stream(full_text)
        if chunk is None:
            self._holds = True
            return ""
        self._holds = False
        if self._repeated:
            chunk = chunk[_shared_length(self._repeated, chunk) :]
            self._repeated = ""
        self._emitted += len(chunk)
        return chunk

    def flush(self) -> str:
        if not self._holds:
            return ""
        self._holds = False
        return self._behind_emitted(self._decode())

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip_special_tokens)
        return text

    def _behind_emitted(self, full_text: str) -> str:
        shared = _shared_length(self._prompt_text, full_text)
        return full_text[shared + self._emitted :]

    def _primed_stream(self, text: str) -> tuple[DecodeStream, str]:
        """Returns a stream that continues after the ids so far, and the end of ``text`` that it will repeat."""
        from tokenizers.decoders import DecodeStream

        try:
            stream = DecodeStream(ids=self._ids, skip_special_tokens=self._skip_special_tokens)
        except TypeError:  # tokenizers 0.21, beside transformers 4.47, primes only by stepping
            stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
            passed = [stream.step(self._tokenizer, token_id) or "" for token_id in self._ids]
            return stream, text[len("".join(passed)) :]
        # Ids that end inside a character are not a prefix for it: the stream then repeats the whole text.
        return stream, text if text.endswith(INCOMPLETE) else ""


def _shared_length(a: str, b: str) -> int:
    """Returns the length of the longest common prefix."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    return next(index for index in range(length) if a[index] != b[index])


class ByteTextStream:
    """The text of one answer where each id below 256 is a byte of UTF-8 and every other id has no text."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(bytes(token_id for token_id in prompt_ids if token_id < 256))
        # As decoded where no byte completes it: one U+FFFD, or two for the beginning of a surrogate (ED A0).
        self._rest_of_prompt = bytes(self._decoder.getstate()[0]).decode(errors="replace")

    def push(self, token_id: int) -> str:
        if token_id >= 256:
            return ""
        return self._without_prompt(self._decoder.decode(bytes([token_id])))

    def flush(self) -> str:
        return self._without_prompt(self._decoder.decode(b"", final=True))

    def _without_prompt(self, chunk: str) -> str:
        if chunk and self._rest_of_prompt:
            prefix, self._rest_of_prompt = self._rest_of_prompt, ""
            return chunk.removeprefix(prefix)
        return chunk


class StopScanner:
    """Finds the first stop string in text that arrives in pieces, and never emits a part of it.

    The first is the one whose last character comes first, and the longest of those that end together. The result does
    not depend on how the text is split into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._held = ""
        self.stop = ""  # the one that was found

    def push(self, text: str, ignore: bool = False) -> str:
        """Returns the text that is certain not to be part of a stop string and was not returned before.

        With ``ignore``, a stop string that ends in this piece of text does not count; one that only begins here may
        still be completed by a later piece.
        """
        if self.stop:
            return ""
        if not self._stops:
            return text
        held_length = len(self._held)
        text = self._held + text
        ends = [
            (start + len(stop), -len(stop))
            for stop in self._stops
            if (start := text.find(stop, max(0, held_length - len(stop) + 1))) >= 0  # earlier ends were ignored
        ]
        if ends and not ignore:
            end, negative_length = min(ends)
            self.stop = text[end + negative_length : end]
            self._held = ""
            return text[: end + negative_length]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Returns the text held back as a possible stop string, now that the answer has ended."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class AnswerText:
    """The text that a client sees of one answer: detokenized, cut before the first stop string."""

    def __init__(self, stream: TextStream, stops: Sequence[str], min_tokens: int = 0) -> None:
        """Stop strings that the first ``min_tokens`` tokens complete are text like any other (vLLM's rule)."""
        self._stream = stream
        self._scanner = StopScanner(stops)
        self._ignored_tokens = min_tokens

    @property
    def stop(self) -> str:
        """The stop string that was found; empty before. Nothing is returned afterwards."""
        return self._scanner.stop

    def push(self, token_id: int) -> str:
        """Returns the final text that ``token_id`` adds. Not for the id that ends the answer: it has no text."""
        ignore = self._ignored_tokens > 0
        self._ignored_tokens -= 1
        return self._scanner.push(self._stream.push(token_id), ignore)

    def finish(self) -> str:
        """Returns the rest of the text. It may still contain a stop string, see ``stop``."""
        if self.stop:
            return ""
        return self._scanner.push(self._stream.flush(), self._ignored_tokens >= 0) + self._scanner.flush()
