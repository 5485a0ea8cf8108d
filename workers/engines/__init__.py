"""The engines, each in a folder or module of its own that imports its libraries only when it is opened."""
