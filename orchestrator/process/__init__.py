"""What every process of corewright uses: the home folder, logs, ports, versions, clocks. Imports no other room."""
