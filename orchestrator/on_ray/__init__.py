"""Everything that imports Ray: the cluster client, actors, host actor and nodes."""
