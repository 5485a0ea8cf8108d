"""Parses tool calls in the text of an answer, complete or streamed."""
