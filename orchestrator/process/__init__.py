"""Shared by every process of corewright: the home folder, logs, ports, versions, clocks; imports no other folder."""
