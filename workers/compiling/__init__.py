"""Predicts, checks and compiles what a start needs, without claiming cores."""
