"""The artifacts that a host keeps, within a budget of disk."""
