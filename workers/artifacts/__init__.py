"""Where models come from, and what of them this host keeps: sources, transfer, the store. No Ray, no torch."""
