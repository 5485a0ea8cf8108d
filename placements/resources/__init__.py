"""Memory, threads and environment of one replica."""
