"""Reads the configuration of LMI (DJL Serving) containers, and writes the spec that behaves the same."""
