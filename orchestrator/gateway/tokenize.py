"""The answers of /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

import msgspec

from orchestrator.gateway.chat import chat_prompt
from orchestrator.gateway.errors import invalid
from orchestrator.gateway.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from workers.tokenizer import Tokenizer


class Tokenized(msgspec.Struct, frozen=True):
    """``token_strs`` are the tokens as the vocabulary writes them, where they were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct, frozen=True):
    """The text of the tokens, special ones among it."""

    prompt: str


def tokenized(asked: TokenizeTextRequest | TokenizeChatRequest, tokenizer: Tokenizer, max_len: int) -> Tokenized:
    """Raises ApiError 400."""
    if isinstance(asked, TokenizeChatRequest):
        ids = chat_prompt(asked, tokenizer)
    else:
        try:
            ids = tokenizer.encode(asked.prompt, add_special_tokens=asked.add_special_tokens is not False)
        except ValueError as error:
            raise invalid(f"prompt: {error}", param="prompt") from None
    return Tokenized(len(ids), max_len, ids, tokenizer.tokens(ids) if asked.return_token_strs else None)


def detokenized(asked: DetokenizeRequest, tokenizer: Tokenizer) -> Detokenized:
    """Raises ApiError 400 for an id that the tokenizer has not."""
    highest = tokenizer.vocab_size - 1
    for id in asked.tokens:
        if id > highest:
            raise invalid(f"tokens: {id} is no token id of this model (0 to {highest})", param="tokens")
    return Detokenized(tokenizer.decode(asked.tokens))
