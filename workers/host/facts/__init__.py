"""Facts of a host from its tools and its kernel, read with deadlines and without raising."""
