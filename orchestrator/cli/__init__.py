"""The command `corewright`: one module for each group of commands."""
