"""An engine that repeats its prompt, for tests of everything around engines."""
