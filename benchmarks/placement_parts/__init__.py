"""What `benchmarks.placement` measures with: fleets made of a seed, their exact optimum, first fit, and the checker."""
