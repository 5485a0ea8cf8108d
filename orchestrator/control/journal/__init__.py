"""The truth about a fleet on disk: the journal, its records, what they add up to, and its copy."""
