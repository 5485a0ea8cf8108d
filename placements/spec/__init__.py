"""The spec: its schema, its parser, and the problems found in it with their positions."""
