"""The echo engines, which need no model."""
