"""From a chat request to the ids of its prompt, and to what reads the calls in its answer."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.gateway.openai import errors
from orchestrator.gateway.openai.protocol import Chat, ChatRequest, NamedTool, TokenizeChatRequest
from orchestrator.gateway.openai.toolcalls import Format, ToolParser, make_parser, recognised
from orchestrator.gateway.openai.toolcalls.formats import FORMATS
from workers.text.tokenizer import ChatTemplateError, NoChatTemplate, NoToolsInTemplate, PromptTokenizer


def chat_prompt(asked: Chat, tokenizer: PromptTokenizer, most: int | None = None) -> list[int]:
    """The ids of the chat as the model's template writes it. A request that forbids calls (`tool_choice: none`) tells
    the model of no tools. Raises ApiError 400, and TooManyTokens for more than ``most`` ids.
    """
    messages = [message.for_template(place) for place, message in enumerate(asked.messages)]
    forbids = isinstance(asked, ChatRequest) and asked.calling == "none"
    tools = None if forbids else [tool.for_template() for tool in asked.tools or ()]
    try:
        return tokenizer.apply_chat_template(
            messages,
            tools or None,
            add_generation_prompt=asked.add_generation_prompt is not False,
            continue_final_message=bool(asked.continue_final_message),
            template_kwargs=asked.chat_template_kwargs,
            add_special_tokens=isinstance(asked, TokenizeChatRequest) and bool(asked.add_special_tokens),
            most=most,
        )
    except NoChatTemplate as error:
        raise errors.invalid(f"{asked.model}: {error}", param="messages", code="no_chat_template") from None
    except NoToolsInTemplate as error:
        raise errors.invalid(f"{asked.model}: {error}", param="tools", code="tools_not_supported") from None
    except (ChatTemplateError, ValueError) as error:
        raise errors.invalid(f"messages: {error}", param="messages", code="chat_template_failed") from None


def tool_parser_for(asked: ChatRequest, setting: str, tokenizer: PromptTokenizer) -> Callable[[], ToolParser] | None:
    """What makes a parser for each choice of the answer; None where the answer is text and nothing else.

    ``setting`` is the model's `tool_parser`. Called after ``chat_prompt``, which refuses tools that the template does
    not know. Raises ApiError 400 where calls are allowed and could not be read.
    """
    calling = asked.calling
    if calling == "none":
        return None
    format = format_of(setting, tokenizer)
    only_one = asked.parallel_tool_calls is False
    streamed = bool(asked.stream)
    if isinstance(calling, NamedTool):
        name = calling.function.name
        return lambda: make_parser(format, "named", streamed=streamed, name=name)
    if calling == "auto" and format is None:
        what = (
            f"{asked.model}: how this model writes its calls is not known, so none could be read; send tool_choice "
            "'required' or a function's name, which work with any model, or set its tool_parser in the spec"
        )
        raise errors.invalid(what, param="tool_choice", code="tools_not_supported")
    return lambda: make_parser(format, calling, streamed=streamed, only_one=only_one)


def format_of(setting: str, tokenizer: PromptTokenizer) -> Format | None:
    """How the model writes its calls, by its `tool_parser`; `auto` asks the chat template."""
    if setting == "auto":
        return recognised(tokenizer.chat_template(tools=True))
    return next((format for format in FORMATS if format == setting), None)
