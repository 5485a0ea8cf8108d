"""Fetches artifacts: parallel ranges, verification, resumption, retries."""
