"""Rollouts from one revision to the next: changes, update strategies, relocation, defragmentation. Pure."""
