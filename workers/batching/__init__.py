"""Continuous batching: slots, buckets, sampling, guided decoding."""
