"""The host itself: its facts, processes, core claims, faults and files of others."""
