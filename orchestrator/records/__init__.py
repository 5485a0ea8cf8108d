"""Files that outlive the controller's process: the journal and request traces."""
