"""The daemon, its gateway and its command line: decides which replicas run where, and serves them."""
