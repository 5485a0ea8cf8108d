"""The command line `corewright`: one module for each group of commands."""
