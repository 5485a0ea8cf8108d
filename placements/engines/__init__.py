"""The engines: one registry, and for each engine a folder with what it can do, its memory and its rules. Pure."""
