"""Helpers of the package."""
