"""Predicts, checks and compiles what a start needs, without its cores."""
