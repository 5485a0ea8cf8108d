"""The artifact store of a host, within a disk budget."""
