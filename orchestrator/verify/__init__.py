"""Proves or refutes on a machine what plans and docs assume about it."""
