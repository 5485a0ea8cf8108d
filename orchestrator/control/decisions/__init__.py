"""Decides from a snapshot what a fleet should run: goals, updates, relocations and hosts. Pure."""
