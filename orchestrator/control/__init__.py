"""The controller's loop: observe the fleet, decide, reconcile, and report its status."""
