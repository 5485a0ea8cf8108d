"""A request from the queue to a replica and back."""
