"""What runs beside the cores: replicas, engines, and the artifacts of their host."""
