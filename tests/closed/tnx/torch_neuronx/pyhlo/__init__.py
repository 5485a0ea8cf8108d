"""Writes HLO modules: the messages, the scribe, constants."""
