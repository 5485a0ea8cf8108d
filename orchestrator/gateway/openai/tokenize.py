"""Answers /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

import msgspec

from orchestrator.gateway.anthropic.answer_types import TokenCount
from orchestrator.gateway.openai.chat import chat_prompt
from orchestrator.gateway.openai.errors import invalid, too_many_tokens
from orchestrator.gateway.openai.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from workers.text.tokenizer import PromptTokenizer, TooManyTokens

MOST_TOKENS = 2**18  # of one answer; or the model's max_len, if that is more


class Tokenized(msgspec.Struct, frozen=True):
    """The answer of /tokenize. ``token_strs`` are the tokens as in the vocabulary, if requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct, frozen=True):
    """The answer of /detokenize: the text of the tokens, including special tokens."""

    prompt: str


def write_tokenized(
    request: TokenizeTextRequest | TokenizeChatRequest, tokenizer: PromptTokenizer, max_len: int
) -> tuple[bytes, int]:
    """Returns the answer and how many tokens it cost. Raises ApiError 400."""
    answer = tokenized(request, tokenizer, max_len)
    return msgspec.json.encode(answer), answer.count


def write_count(request: TokenizeChatRequest, tokenizer: PromptTokenizer, max_len: int) -> tuple[bytes, int]:
    """Does what ``write_tokenized`` does, in the shape of the Messages API."""
    count = tokenized(request, tokenizer, max_len).count
    return msgspec.json.encode(TokenCount(count)), count


def write_detokenized(request: DetokenizeRequest, tokenizer: PromptTokenizer, max_len: int) -> tuple[bytes, int]:
    """Returns the answer and how many tokens it cost. Raises ApiError 400."""
    return msgspec.json.encode(detokenized(request, tokenizer, max_len)), len(request.tokens)


def tokenized(
    request: TokenizeTextRequest | TokenizeChatRequest, tokenizer: PromptTokenizer, max_len: int
) -> Tokenized:
    """Tokenizes a text or a chat. Raises ApiError 400."""
    most = max(max_len, MOST_TOKENS)
    try:
        if isinstance(request, TokenizeChatRequest):
            ids = chat_prompt(request, tokenizer, most)
        else:
            ids = tokenizer.encode(
                request.prompt, add_special_tokens=request.add_special_tokens is not False, most=most
            )
    except TooManyTokens as error:
        param = "messages" if isinstance(request, TokenizeChatRequest) else "prompt"
        raise too_many_tokens(param, error.count, most) from None
    except ValueError as error:
        raise invalid(f"prompt: {error}", param="prompt") from None
    return Tokenized(len(ids), max_len, ids, tokenizer.tokens(ids) if request.return_token_strs else None)


def detokenized(request: DetokenizeRequest, tokenizer: PromptTokenizer, max_len: int) -> Detokenized:
    """Decodes token ids. Raises ApiError 400 for too many ids, and for ids outside the vocabulary."""
    if len(request.tokens) > (most := max(max_len, MOST_TOKENS)):
        raise too_many_tokens("tokens", len(request.tokens), most)
    highest = tokenizer.vocab_size - 1
    if (id := max(request.tokens, default=0)) > highest:
        raise invalid(f"tokens: {id} is not a token id of this model (0 to {highest})", param="tokens")
    return Detokenized(tokenizer.decode(request.tokens))
