"""The Ray cluster of a fleet: `up` and `down`, their settings, and all that imports Ray in this package."""
