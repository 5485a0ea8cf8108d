"""What is known of instance types, engines and checkpoints, each with its source."""
