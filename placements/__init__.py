"""The pure core, from a spec and hosts to a plan: no clock, no I/O, no Ray, no torch."""
