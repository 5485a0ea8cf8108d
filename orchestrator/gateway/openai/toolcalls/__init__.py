"""Tool calls in what a model writes: found in the text of an answer, whole or as it comes."""

from orchestrator.gateway.openai.toolcalls.events import CallArguments, CallBegin, Content, Event, ToolParser
from orchestrator.gateway.openai.toolcalls.formats import FORMATS, Format, make_parser, recognised

__all__ = [
    "FORMATS",
    "CallArguments",
    "CallBegin",
    "Content",
    "Event",
    "Format",
    "ToolParser",
    "make_parser",
    "recognised",
]
