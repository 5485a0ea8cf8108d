"""Explains placements, searches for remedies, and renders plans as text."""
