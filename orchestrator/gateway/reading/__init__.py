"""Reads the text of answers: reasoning, content and tool calls."""
