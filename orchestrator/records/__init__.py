"""Files that persist beyond the controller's process: the journal and request traces."""
