"""From a wanted replica to one that can start: its engine resolved, its model fetched and compiled."""
