"""Continuous batching: slots, buckets, sampling and guided decoding."""
