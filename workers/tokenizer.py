"""Text to token ids and back, for the gateway (prompts) and the replica (answers)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from workers.engine import EngineLoadError
from workers.text import ByteTextStream, FastTextStream, TextStream

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

Message = Mapping[str, Any]  # of a chat: role, content

# Any one of these makes a directory worth handing to transformers; without one it may invent a tokenizer.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)


class NoChatTemplate(Exception):
    """This model's tokenizer comes without a chat template: it takes prompts, not messages."""


class ChatTemplateError(Exception):
    """The chat template refused these messages; the text is the template's own."""


class Tokenizer(Protocol):
    """What gateway and replica need of a tokenizer. All methods may be called from several threads at once."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this. The model's own vocabulary may be larger (padded) or smaller."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of ``text``. Raises ValueError for text that is not Unicode (a lone surrogate)."""
        ...

    def apply_chat_template(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a chat, ending where the assistant begins to speak.

        Raises ``NoChatTemplate``, or ``ChatTemplateError`` with the template's message.
        """
        ...

    def stream(self, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> TextStream:
        """An incremental decoder of what follows ``prompt_ids``. The stream itself belongs to one thread at a time."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 that this id stands for in a text, maybe a part of a character; of a special token, its name.

        Empty for an id that stands for nothing, as where the model's vocabulary is padded.
        """
        ...

    def to_json(self) -> str | None:
        """The whole tokenizer in the format of a tokenizer.json; None for one that has no such form."""
        ...


def load_tokenizer(engine: str, path: str | None) -> Tokenizer:
    """The tokenizer of a model directory; bytes for the echo engine, which needs no directory.

    Raises ``EngineLoadError`` with the id ``no-tokenizer`` or ``bad-tokenizer``.
    """
    if engine == "echo":
        return ByteTokenizer()
    if path is None:
        raise EngineLoadError("no-tokenizer", f"the engine {engine} has no model directory to take a tokenizer from")
    return HubTokenizer(path)


class ByteTokenizer:
    """Every byte of UTF-8 is a token; one more id is EOS. Thread-safe: it holds no state."""

    EOS_ID = 256

    @property
    def vocab_size(self) -> int:
        return 257

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(_unicode(text).encode())

    def apply_chat_template(self, messages: Sequence[Message]) -> list[int]:
        """One line ``role: content`` for each message, then ``assistant:``."""
        lines = []
        for message in messages:
            role, content = message.get("role"), message.get("content")
            if not isinstance(role, str) or not isinstance(content, str):
                raise ChatTemplateError("each message needs a role and a content, both text")
            lines.append(f"{role}: {content}\n")
        return self.encode("".join(lines) + "assistant:")

    def stream(self, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> TextStream:
        return ByteTextStream(prompt_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def to_json(self) -> str | None:
        return None


class HubTokenizer:
    """The tokenizer of a model directory, by transformers' AutoTokenizer.

    Only the template is rendered by transformers. Encoding and decoding go straight to the `tokenizers` object, whose
    methods may run in several threads as long as nobody changes its truncation, padding or added tokens: transformers'
    own ``__call__`` does, and then fails with "Already borrowed".
    """

    def __init__(self, path: str | Path) -> None:
        """Raises ``EngineLoadError``: ``no-tokenizer`` when there is none at ``path``, else ``bad-tokenizer``."""
        directory = Path(path)
        if not any((directory / name).is_file() for name in TOKENIZER_FILES):
            raise EngineLoadError(
                "no-tokenizer", f"{directory} has no tokenizer", "save it there with tokenizer.save_pretrained(...)"
            )
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise EngineLoadError("no-tokenizer", f"transformers cannot be imported: {error}") from error
        try:
            loaded = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # its readers raise anything from KeyError to a bare Exception
            raise EngineLoadError(
                "bad-tokenizer", f"the tokenizer in {directory} cannot be read: {type(error).__name__}: {error}"
            ) from error
        if not loaded.is_fast:
            raise EngineLoadError(
                "bad-tokenizer", f"the tokenizer in {directory} has no fast form", "convert it to a tokenizer.json"
            )
        self._hub = loaded
        self._fast = loaded.backend_tokenizer
        self._fast.no_truncation()
        self._fast.no_padding()
        self._vocab_size = len(loaded)
        self._token_bytes = _token_decoder(self._fast)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._fast.encode(_unicode(text), add_special_tokens=add_special_tokens).ids
        return ids

    def apply_chat_template(self, messages: Sequence[Message]) -> list[int]:
        import jinja2

        if self._hub.chat_template is None:
            raise NoChatTemplate("this model has no chat template; send a prompt instead of messages")
        if not messages:
            raise ChatTemplateError("messages are empty")
        try:
            text: Any = self._hub.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise ChatTemplateError(str(error)) from error
        # The template writes the special tokens itself.
        return self.encode(text, add_special_tokens=False)

    def stream(self, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> TextStream:
        return FastTextStream(self._fast, prompt_ids, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        token = self._fast.id_to_token(token_id)
        return b"" if token is None else self._token_bytes(token)

    def to_json(self) -> str | None:
        text: str = self._fast.to_str()
        return text


def _token_decoder(fast: FastTokenizer) -> Callable[[str], bytes]:
    """What one entry of the vocabulary adds to a text, by the kind of the tokenizer's decoder.

    The decoder itself cannot be asked: it answers with text, where bytes that are no whole character are lost.
    """
    decoder = json.loads(fast.decoder.__getstate__()) if fast.decoder is not None else {}
    steps = {step["type"]: step for step in decoder.get("decoders", [decoder]) if step}
    if "ByteLevel" in steps:
        return _byte_level_token
    if "ByteFallback" in steps or "Metaspace" in steps:
        space = steps.get("Metaspace", {}).get("replacement", "▁")
        falls_back = "ByteFallback" in steps
        return lambda token: _sentencepiece_token(token, space, falls_back)
    if fast.decoder is None:
        return str.encode
    return lambda token: str(fast.decoder.decode([token])).encode()


def _byte_level_token(token: str) -> bytes:
    """Every character stands for a byte; a token with any other character, an added one, stands for itself."""
    try:
        return bytes(_byte_of_character()[character] for character in token)
    except KeyError:
        return token.encode()


def _sentencepiece_token(token: str, space: str, falls_back: bool) -> bytes:
    if falls_back and (found := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)):
        return bytes([int(found[1], 16)])
    return token.replace(space, " ").encode()


@cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, every other byte for a character from 256 on."""
    itself = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text is not Unicode: {error.reason} at character {error.start}") from error
    return text
