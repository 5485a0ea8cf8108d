"""What the controller knows and has decided, with the journal behind it."""
