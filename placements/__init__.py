"""The pure core: from a spec and hosts to a plan. No clock, no I/O, no Ray, no torch."""
