"""SageMaker: what its model folders hold as specs, and the command line of its containers."""
