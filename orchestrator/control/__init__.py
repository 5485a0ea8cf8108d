"""The control loop: observe the fleet, compute the desired state, reconcile, and report the status."""
