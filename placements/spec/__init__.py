"""The spec: its schema, its parser, and problems with their positions."""
