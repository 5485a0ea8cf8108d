"""Metric families cross processes as messages of actors."""

import pickle

from workers.messages.metric_family import gauge


def test_a_gauge_of_a_condition_crosses_processes() -> None:
    """A condition is 0 or 1: a message with a bool could not be read."""
    assert pickle.loads(pickle.dumps(gauge("ready", "1 if ready.", True))).points[0].value == 1.0
