"""Shared values of the fleet: snapshot, replica life cycle, route table, and the effects on it."""
