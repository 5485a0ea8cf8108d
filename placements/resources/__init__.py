"""Computes the memory, threads, environment and speed of one replica."""
