"""Facts about instance types, releases and checkpoints, each with its source."""
