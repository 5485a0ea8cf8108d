"""The engines, each in a folder with its runner, which imports its libraries only when it is opened."""
