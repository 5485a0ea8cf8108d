"""Trains and examines the demo models of placements/examples/models/."""
