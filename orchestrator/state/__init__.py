"""The controller's state of the fleet, persisted in the journal."""
