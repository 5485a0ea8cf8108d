"""Parses tool calls in the text of an answer, complete or streamed."""

from orchestrator.gateway.openai.toolcalls.events import CallArguments, CallBegin, Content, Event, ToolParser
from orchestrator.gateway.openai.toolcalls.formats import FORMATS, Format, detect_format, make_parser

__all__ = [
    "FORMATS",
    "CallArguments",
    "CallBegin",
    "Content",
    "Event",
    "Format",
    "ToolParser",
    "detect_format",
    "make_parser",
]
