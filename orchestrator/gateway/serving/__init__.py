"""The way of a request from the queue to a replica and back."""
