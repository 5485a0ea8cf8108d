"""The fleet as values that every part shares: snapshot, replica life cycle, route table, and the effects on it."""
