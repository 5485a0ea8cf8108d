"""Facts about instance types, engines and checkpoints, each with its source."""
