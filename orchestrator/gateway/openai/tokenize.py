"""The answers of /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

import msgspec

from orchestrator.gateway.openai.chat import chat_prompt
from orchestrator.gateway.openai.errors import invalid, too_many_tokens
from orchestrator.gateway.openai.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from workers.text.tokenizer import PromptTokenizer, TooManyTokens

MOST_TOKENS = 2**18  # of one answer; as many as the model takes, where that is more


class Tokenized(msgspec.Struct, frozen=True):
    """``token_strs`` are the tokens as the vocabulary writes them, where they were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct, frozen=True):
    """The text of the tokens, special ones among it."""

    prompt: str


def tokenized(asked: TokenizeTextRequest | TokenizeChatRequest, tokenizer: PromptTokenizer, max_len: int) -> Tokenized:
    """Raises ApiError 400."""
    most = max(max_len, MOST_TOKENS)
    try:
        if isinstance(asked, TokenizeChatRequest):
            ids = chat_prompt(asked, tokenizer, most)
        else:
            ids = tokenizer.encode(asked.prompt, add_special_tokens=asked.add_special_tokens is not False, most=most)
    except TooManyTokens as error:
        param = "messages" if isinstance(asked, TokenizeChatRequest) else "prompt"
        raise too_many_tokens(param, error.count, most) from None
    except ValueError as error:
        raise invalid(f"prompt: {error}", param="prompt") from None
    return Tokenized(len(ids), max_len, ids, tokenizer.tokens(ids) if asked.return_token_strs else None)


def detokenized(asked: DetokenizeRequest, tokenizer: PromptTokenizer, max_len: int) -> Detokenized:
    """Raises ApiError 400 for too many ids, and for one that the tokenizer does not have."""
    if len(asked.tokens) > (most := max(max_len, MOST_TOKENS)):
        raise too_many_tokens("tokens", len(asked.tokens), most)
    highest = tokenizer.vocab_size - 1
    if (id := max(asked.tokens, default=0)) > highest:
        raise invalid(f"tokens: {id} is no token id of this model (0 to {highest})", param="tokens")
    return Detokenized(tokenizer.decode(asked.tokens))
