"""Shared by every process of corewright: the home folder, logs, ports, versions, clocks. Imports no other room."""
