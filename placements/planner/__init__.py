"""From a spec and hosts to a plan: which replica gets which cores."""
