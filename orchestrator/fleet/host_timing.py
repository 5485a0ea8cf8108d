"""Times that decide when hosts come and go, in a fleet and in its simulation."""

START_S = 300.0
"""Assumed from the request of a machine until it joins, if none of its type was measured."""
CHECK_S = 10.0
"""Between two searches for a host to give back."""
SPARE_S = 60.0
"""A host is given back once it was spare for this long, and for the time that its machine takes to start."""
