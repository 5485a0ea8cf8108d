"""What `corewright verify` measures on a machine, claim by claim."""
