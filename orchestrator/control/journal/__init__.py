"""The durable state of a fleet: the journal, its records, their fold, and its copy."""
