"""Picks the next request and its replica: fair queue, predicted waits, headroom, prefix index. Pure."""
