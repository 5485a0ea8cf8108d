"""The host: its facts, processes, core claims, faults, and untrusted files."""
