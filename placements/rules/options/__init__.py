"""What ``engine_options`` may hold for the Neuron engines: their packages' own options, judged."""
