"""Tokenizers: text to token ids and back, for the gateway (prompts) and the replica (answers)."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from placements.engines.registry import ENGINES
from workers.host import foreign_files
from workers.host.interpreter import is_in_transformers
from workers.messages.encoder_protocol import EncodeInput
from workers.messages.engine_protocol import EngineLoadError
from workers.text.detokenizer import ByteTextStream, FastTextStream, TextStream
from workers.text.input_tokens import (
    InputTexts,
    InputTokenizer,
    TokenLengths,
    encode_bytes,
    lower_case_first,
    token_lengths,
)
from workers.text.input_tokens import TooManyTokens as TooManyTokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

Message = Mapping[str, Any]  # of a chat: role, content; with tools also tool_calls, tool_call_id and name
Tool = Mapping[str, Any]  # in OpenAI's shape: type, and function with its name, description and parameters

# Without any of these in a directory, transformers may invent a tokenizer.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
SHORT_CHARACTERS = 2048  # up to this length `tokenizers` holds the GIL for less time than releasing it may cost
PIECE_CHARACTERS = 2**18  # a longer text is counted in pieces before it is tokenized whole: 35 MB of memory each
PIECE_SLACK = 1024  # tokens of a piece that are not counted: a cut changes the tokens of the text around it


class NoChatTemplate(Exception):
    """The model's tokenizer has no chat template: it takes prompts, not messages."""


class ChatTemplateError(Exception):
    """The chat template rejected the messages; the text is the template's own."""


class NoToolsInTemplate(ChatTemplateError):
    """The chat template does not render tools, so the model could not call one."""


class TemplateInput(msgspec.Struct, frozen=True):
    """A chat to be rendered by the model's template."""

    messages: Sequence[Message]
    tools: Sequence[Tool] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # end in the last message, which the answer continues
    template_kwargs: Mapping[str, Any] | None = None  # further variables of the template
    add_special_tokens: bool = False  # once more, besides those that the template writes


class PromptTokenizer(Protocol):
    """The interface of a tokenizer in a gateway. All methods may be called from several threads at once."""

    def __hash__(self) -> int: ...

    @property
    def vocab_size(self) -> int:
        """Ids are below this. The model's own vocabulary may be larger (padded) or smaller."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True, *, most: int | None = None) -> list[int]:
        """Returns the ids of ``text``.

        Raises ValueError for text that is not Unicode (a lone surrogate), and TooManyTokens for more than ``most``
        tokens: a long text is then not tokenized to its end.
        """
        ...

    def encode_inputs(self, texts: InputTexts) -> list[EncodeInput]:
        """Returns the inputs of an encoder, in their order.

        Raises TooManyTokens with the place of the first input that is too long, and ValueError if a cut leaves no room
        for text.
        """
        ...

    def apply_chat_template(self, chat: TemplateInput, most: int | None = None) -> list[int]:
        """Returns the ids of a chat, up to where the assistant's answer begins.

        Raises ``NoChatTemplate``, or ``ChatTemplateError`` with the template's message; ``NoToolsInTemplate`` for
        tools that the template would not render. ``most`` is as for ``encode``.
        """
        ...

    def chat_template(self, tools: bool) -> str | None:
        """Returns the template of chats with or without tools; None where there is none."""
        ...

    @property
    def response_template(self) -> Any:
        """The checkpoint's description of its answers, from tokenizer_config.json; None where there is none."""
        ...

    @property
    def special_tokens(self) -> Sequence[str]:
        """The texts of special tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, including special tokens; unknown ids are left out."""
        ...

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Returns each id as the vocabulary writes it, such as "Ġhello"; empty for an unknown id."""
        ...

    def text(self, ids: Sequence[int]) -> str:
        """Returns the text of ids as in an answer, without special tokens."""
        ...


class Tokenizer(PromptTokenizer, Protocol):
    """The interface of a tokenizer in a replica."""

    def stream(self, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> TextStream:
        """Returns an incremental decoder of the tokens after ``prompt_ids``, for one thread at a time."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the UTF-8 of this id in a text, maybe a part of a character; for a special token, its name.

        Empty for an unknown id, as in a padded vocabulary.
        """
        ...

    def to_json(self) -> str | None:
        """Returns the tokenizer in the format of tokenizer.json; None where it has no such form."""
        ...


OF_BYTES = frozenset(name for name, engine in ENGINES.items() if engine.tokenizer == "bytes")
"""The engines whose tokens are bytes."""


def load_tokenizer(engine: str, path: str | None) -> Tokenizer:
    """Returns the tokenizer of a model directory; a byte tokenizer for an engine that needs no directory.

    Raises ``EngineLoadError`` with the id ``no-tokenizer`` or ``bad-tokenizer``.
    """
    if engine in OF_BYTES:
        return ByteTokenizer()
    if path is None:
        raise EngineLoadError("no-tokenizer", f"the engine {engine} has no model directory to load a tokenizer from")
    return HubTokenizer(path)


def check_tokenizer_files(directory: Path, names: Collection[str] | None = None, *, runs_class: bool = False) -> None:
    """Check the tokenizer of a model directory without loading it, which takes seconds of imports.

    ``names``: the files of the model, if the directory has only the small ones. ``runs_class``: a server would also run
    the class of the checkpoint, which is not trusted. Raises the same errors as ``load_tokenizer``.
    """
    names = [name for name in TOKENIZER_FILES if (directory / name).is_file()] if names is None else names
    if not any(name in names for name in TOKENIZER_FILES):
        raise EngineLoadError(
            "no-tokenizer", f"{directory} has no tokenizer", "save it there with tokenizer.save_pretrained(...)"
        )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        file = directory / name
        try:
            foreign_files.check_folder(directory)
            if file.is_file():
                data = foreign_files.read_bytes(file, foreign_files.MAX_TOKENIZER_BYTES)
                if file.suffix == ".json":
                    msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        except (OSError, ValueError, RecursionError) as error:
            message = f"the tokenizer in {directory} cannot be read: {name}: {error}"
            raise EngineLoadError("bad-tokenizer", message, "copy the file again") from error
    if ("tokenizer.json" not in names or runs_class) and (code := own_class(directory)):
        message = f"the tokenizer in {directory} is implemented only by code of the checkpoint, {code}"
        hint = "save it as tokenizer.json, and remove auto_map from tokenizer_config.json"
        raise EngineLoadError("tokenizer-needs-code", message, hint)


def own_class(directory: Path) -> str | None:
    """Returns the class of a model's tokenizer if only code of the checkpoint defines it, as "file.Class"; else None.
    The class is never run: tokenizer.json is read without it."""
    try:
        config = foreign_files.read_json(directory / "tokenizer_config.json")
    except (OSError, ValueError):
        return None
    named = config.get("auto_map") if isinstance(config, dict) else None
    code = named.get("AutoTokenizer") if isinstance(named, Mapping) else named
    classes = [str(each) for each in (code if isinstance(code, list) else [code]) if each]
    known = str(config.get("tokenizer_class")).removesuffix("Fast") if classes else ""
    if not classes or any(is_in_transformers(f'"{known}{end}"') for end in ("", "Fast")):
        return None
    return classes[-1]


class ByteTokenizer:
    """A tokenizer where each byte of UTF-8 is a token; one more id is EOS. Thread-safe: it holds no state."""

    EOS_ID = 256
    vocab_size = 257
    response_template: Any = None
    special_tokens: Sequence[str] = ()

    def encode(self, text: str, add_special_tokens: bool = True, *, most: int | None = None) -> list[int]:
        data = unicode(text).encode()
        if most is not None and len(data) > most:
            raise TooManyTokens(len(data), exact=True)
        return list(data)

    def encode_inputs(self, texts: InputTexts) -> list[EncodeInput]:
        return encode_bytes(texts)

    def apply_chat_template(self, chat: TemplateInput, most: int | None = None) -> list[int]:
        """Returns one line ``role: content`` for each message, then ``assistant:``. It has no variables."""
        if chat.tools:
            raise NoToolsInTemplate(_NO_TOOLS)
        lines = []
        for message in chat.messages:
            role, content = message.get("role"), message.get("content")
            if not isinstance(role, str) or not isinstance(content, str):
                raise ChatTemplateError("each message needs a role and a content, both strings")
            lines.append(f"{role}: {content}\n")
        if chat.continue_final_message:
            return self.encode("".join(lines).removesuffix("\n"), most=most)
        return self.encode("".join(lines) + ("assistant:" if chat.add_generation_prompt else ""), most=most)

    def chat_template(self, tools: bool) -> str | None:
        return None

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(id for id in ids if id < 256).decode(errors="replace")

    def tokens(self, ids: Sequence[int]) -> list[str]:
        return [bytes([id]).decode("latin-1") if id < 256 else "" for id in ids]

    def text(self, ids: Sequence[int]) -> str:
        return _streamed(self.stream([]), ids)

    def stream(self, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> TextStream:
        return ByteTextStream(prompt_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def to_json(self) -> str | None:
        return None


class HubTokenizer:
    """The tokenizer of a model directory, loaded by transformers.

    Only chat templates are rendered by transformers. Encoding and decoding use the `tokenizers` object, whose methods
    may run in several threads as long as no thread changes its truncation, padding or added tokens: transformers' own
    ``__call__`` does, and then fails with "Already borrowed".
    """

    def __init__(self, path: str | Path, lower_case: bool = False) -> None:
        """``lower_case``: all text is lower-cased, except special tokens. Raises ``EngineLoadError``: ``no-tokenizer``
        when there is none at ``path``, else ``bad-tokenizer``."""
        directory = Path(path)
        check_tokenizer_files(directory)
        try:
            from transformers import AutoTokenizer, PreTrainedTokenizerFast
        except ImportError as error:
            raise EngineLoadError("no-tokenizer", f"transformers cannot be imported: {error}") from error
        try:
            loader = AutoTokenizer if own_class(directory) is None else PreTrainedTokenizerFast
            loaded = loader.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # its readers raise anything from KeyError to a bare Exception
            raise EngineLoadError(
                "bad-tokenizer", f"the tokenizer in {directory} cannot be read: {type(error).__name__}: {error}"
            ) from error
        if not loaded.is_fast:
            raise EngineLoadError(
                "bad-tokenizer", f"the tokenizer in {directory} has no fast form", "convert it to tokenizer.json"
            )
        self._hub = loaded
        self._fast = loaded.backend_tokenizer
        self._fast.no_truncation()
        self._fast.no_padding()
        if lower_case:
            lower_case_first(self._fast)
        self.vocab_size = len(loaded)
        # transformers before 5.13 keeps it with the other arguments
        self.response_template = getattr(loaded, "response_template", loaded.init_kwargs.get("response_template"))
        added = self._fast.get_added_tokens_decoder().values()
        self.special_tokens: Sequence[str] = [token.content for token in added if token.special]
        self._token_bytes = _token_decoder(self._fast)
        self._lengths: TokenLengths | None = token_lengths(self._fast, _byte_of_character())

    def encode(self, text: str, add_special_tokens: bool = True, *, most: int | None = None) -> list[int]:
        text = unicode(text)
        if len(text) <= SHORT_CHARACTERS:
            encoding = self._fast.encode(text, add_special_tokens=add_special_tokens)
        else:
            if most is not None:
                self._check_length(text, most)
            # `encode` holds the GIL throughout, 1.6 s for a MB; the batch's releases it and computes no offsets.
            encoding = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        if most is not None and len(encoding) > most:
            raise TooManyTokens(len(encoding), exact=True)
        ids: list[int] = encoding.ids
        return ids

    def encode_inputs(self, texts: InputTexts) -> list[EncodeInput]:
        """See ``PromptTokenizer``, but while it runs, no other thread may use this object."""
        hub = self._hub
        types, keeps_end = "token_type_ids" in hub.model_input_names, hub.truncation_side == "left"
        inputs = InputTokenizer(
            self._fast, hub.model_max_length, types, keeps_end, hub.all_special_ids, self._check_length
        )
        return inputs.encode(texts)

    def _check_length(self, text: str, most: int) -> None:
        """Raises TooManyTokens for a text that certainly has more than ``most``.

        A text that may fit by its length is counted in pieces, so that one that is far too long is not tokenized
        whole, at 140 bytes of memory for each token. A cut may change the tokens of the text around it, so only twice
        ``most`` is certainly too many.
        """
        if self._lengths is not None and (fewest := self._lengths.fewest(text)) > most:
            raise TooManyTokens(fewest - 1, exact=False)
        if len(text) <= PIECE_CHARACTERS:
            return
        count = 0
        for start in range(0, len(text), PIECE_CHARACTERS):
            piece = text[start : start + PIECE_CHARACTERS]
            count += max(0, len(self._fast.encode_batch_fast([piece])[0]) - PIECE_SLACK)
            if count > 2 * most:
                raise TooManyTokens(most, exact=False)

    def apply_chat_template(self, chat: TemplateInput, most: int | None = None) -> list[int]:
        import jinja2

        tools: list[Any] = [dict(tool) for tool in chat.tools or ()]
        template = self.chat_template(bool(tools))
        if template is None:
            raise NoChatTemplate("this model has no chat template; send a prompt instead of messages")
        if not chat.messages:
            raise ChatTemplateError("messages must not be empty")
        words = _words_in(template)
        if tools and "tools" not in words:
            raise NoToolsInTemplate(_NO_TOOLS)
        variables = dict(chat.template_kwargs or {})
        if reserved := sorted(variables.keys() & _arguments_of(self._hub.apply_chat_template)):
            raise ChatTemplateError(f"{reserved[0]} is not a variable of chat templates")
        try:
            text: Any = self._hub.apply_chat_template(
                [_normalized(words, message) for message in chat.messages],
                tools=tools or None,
                tokenize=False,
                add_generation_prompt=chat.add_generation_prompt and not chat.continue_final_message,
                continue_final_message=chat.continue_final_message,
                **variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise ChatTemplateError(str(error)) from error
        except (RecursionError, OverflowError, ZeroDivisionError, MemoryError) as error:
            raise ChatTemplateError(f"the chat template cannot be filled in: {type(error).__name__}") from error
        return self.encode(text, add_special_tokens=chat.add_special_tokens, most=most)

    def chat_template(self, tools: bool) -> str | None:
        """Some models have several by name; like transformers, prefer ``tool_use`` for tools, where it exists."""
        template = self._hub.chat_template
        if isinstance(template, Mapping):
            template = (template.get("tool_use") if tools else None) or template.get("default")
        return None if template is None else str(template)

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._fast.decode_batch([list(ids)], skip_special_tokens=False)[0]  # `decode` holds the GIL
        return text

    def tokens(self, ids: Sequence[int]) -> list[str]:
        return [self._fast.id_to_token(id) or "" for id in ids]

    def text(self, ids: Sequence[int]) -> str:
        return _streamed(self.stream([]), ids)

    def stream(self, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> TextStream:
        return FastTextStream(self._fast, prompt_ids, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        token = self._fast.id_to_token(token_id)
        return b"" if token is None else self._token_bytes(token)

    def to_json(self) -> str | None:
        text: str = self._fast.to_str()
        return text


_NO_TOOLS = "this model's chat template does not support tools; use a model trained with tools, or omit them"


@lru_cache(maxsize=256)
def _words_in(template: str) -> frozenset[str]:
    """Returns the words in a template's expressions and statements, without its text and comments."""
    code = re.findall(r"\{%.*?%\}|\{\{.*?\}\}", re.sub(r"\{#.*?#\}", "", template, flags=re.DOTALL), re.DOTALL)
    return frozenset(re.findall(r"\w+", " ".join(code)))


def _normalized(words: frozenset[str], message: Message) -> dict[str, Any]:
    """Returns the message as the template reads it.

    1. OpenAI's newer role ``developer`` becomes ``system`` where the template does not name it and would drop it.
    2. The reasoning, ``reasoning_content``, also gets the other names that the template reads.
    3. Templates of gpt-oss reject ``thinking`` beside text before a call, which they render in the same channel.
    4. Mistral's templates take it as a part of the content.
    """
    read = dict(message)
    if read["role"] == "developer" and "developer" not in words:
        read["role"] = "system"  # 1
    if (reasoning := read.get("reasoning_content")) is None:
        return read
    read |= {name: reasoning for name in ("reasoning", "thinking") if name in words}  # 2
    content, is_other = read["content"], "reasoning_content" not in words
    if is_other and words >= {"thinking", "channel"} and content and read.get("tool_calls"):
        read |= {"thinking": f"{reasoning}\n\n{content}", "content": ""}  # 3
    elif is_other and words >= {"thinking", "THINK"}:
        parts = [{"type": "thinking", "thinking": reasoning}, {"type": "text", "text": content}]
        read["content"] = parts if content else parts[:1]  # 4
    return read


@cache
def _parameters(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _arguments_of(method: Any) -> frozenset[str]:
    """Returns the renderer's own arguments; all others are the template's variables (``kwargs``)."""
    return _parameters(method.__func__) | {"messages", "tools"}


def _token_decoder(fast: FastTokenizer) -> Callable[[str], bytes]:
    """Returns a function from a vocabulary entry to the bytes that it adds to a text, by the kind of decoder.

    The decoder itself returns text, which loses bytes that are not a complete character.
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
    """Every character represents a byte; a token with any other character, an added one, is literal text."""
    try:
        return bytes(_byte_of_character()[character] for character in token)
    except KeyError:
        return token.encode()


def _sentencepiece_token(token: str, space: str, falls_back: bool) -> bytes:
    if falls_back and (match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)):
        return bytes([int(match[1], 16)])
    return token.replace(space, " ").encode()


@cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 represents itself, other bytes are mapped to characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    remaining = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(remaining)}


def _streamed(stream: TextStream, ids: Sequence[int]) -> str:
    return "".join([*(stream.push(id) for id in ids), stream.flush()])


def unicode(text: str) -> str:
    """Returns the text. Raises ValueError where it is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text is not valid Unicode: {error.reason} at character {error.start}") from error
    return text
