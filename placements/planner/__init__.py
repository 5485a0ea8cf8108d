"""Plans a spec on hosts: assigns cores to replicas."""
