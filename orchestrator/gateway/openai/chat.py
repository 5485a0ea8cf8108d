"""Turns a chat request into its prompt's token ids and the parser of tool calls in its answer."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.gateway.openai import errors
from orchestrator.gateway.openai.protocol import Chat, ChatRequest, NamedTool, TokenizeChatRequest
from orchestrator.gateway.openai.toolcalls.events import ToolParser
from orchestrator.gateway.openai.toolcalls.formats import FORMATS, Format, detect_format, make_parser
from workers.text.tokenizer import ChatTemplateError, NoChatTemplate, NoToolsInTemplate, PromptTokenizer, TemplateInput


def chat_prompt(request: Chat, tokenizer: PromptTokenizer, most: int | None = None) -> list[int]:
    """Returns the token ids of the chat, rendered by the model's template. With `tool_choice: none` the prompt has no
    tools. Raises ApiError 400, and TooManyTokens for more than ``most`` ids.
    """
    messages = [message.for_template(place) for place, message in enumerate(request.messages)]
    forbids = isinstance(request, ChatRequest) and request.calling == "none"
    tools = None if forbids else [tool.for_template() for tool in request.tools or ()]
    try:
        chat = TemplateInput(
            messages,
            tools or None,
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final_message=bool(request.continue_final_message),
            template_kwargs=request.chat_template_kwargs,
            add_special_tokens=isinstance(request, TokenizeChatRequest) and bool(request.add_special_tokens),
        )
        return tokenizer.apply_chat_template(chat, most)
    except NoChatTemplate as error:
        raise errors.invalid(f"{request.model}: {error}", param="messages", code="no_chat_template") from None
    except NoToolsInTemplate as error:
        raise errors.invalid(f"{request.model}: {error}", param="tools", code="tools_not_supported") from None
    except (ChatTemplateError, ValueError) as error:
        raise errors.invalid(f"messages: {error}", param="messages", code="chat_template_failed") from None


def tool_parser_for(request: ChatRequest, setting: str, tokenizer: PromptTokenizer) -> Callable[[], ToolParser] | None:
    """Returns a function that makes a parser for each choice; None for an answer that is only text.

    ``setting`` is the model's `tool_parser`. Called after ``chat_prompt``, which rejects tools that the template does
    not support. Raises ApiError 400 if calls are allowed but could not be read.
    """
    calling = request.calling
    if calling == "none":
        return None
    format = format_of(setting, tokenizer)
    only_one = request.parallel_tool_calls is False
    streamed = bool(request.stream)
    if isinstance(calling, NamedTool):
        name = calling.function.name
        return lambda: make_parser(format, "named", streamed=streamed, name=name)
    if calling == "auto" and format is None:
        message = (
            f"{request.model}: the format of this model's tool calls is unknown; send tool_choice 'required' or a "
            "function's name, which work with any model, or set the model's tool_parser in the spec"
        )
        raise errors.invalid(message, param="tool_choice", code="tools_not_supported")
    return lambda: make_parser(format, calling, streamed=streamed, only_one=only_one)


def format_of(setting: str, tokenizer: PromptTokenizer) -> Format | None:
    """Returns the format of the model's calls by its `tool_parser`; `auto` detects it in the chat template."""
    if setting == "auto":
        return detect_format(tokenizer.chat_template(tools=True))
    return next((format for format in FORMATS if format == setting), None)
