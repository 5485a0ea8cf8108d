"""SageMaker: reads its model folders as specs."""
